"""`LayerOps`: the ops that a module of a model calls."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from megatron_async.ops.all_ops import Ops


class LayerOps:
    """An attribute of a module: the ops that it calls. `bind_ops` sets it, when an engine gets the
    model; before, they are those of the device of the module's parameters."""

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Ops:
        if module is None:
            raise AttributeError("ops are a module's, not its class's")
        parameter = next(module.parameters(), None)
        return _ops_of(torch.device("cpu") if parameter is None else parameter.device)


def bind_ops(model: nn.Module, ops: Ops) -> None:
    """Give all modules of a model with `LayerOps` an engine's. Of engines that share a model, the
    last one's ops serve all."""
    for module in model.modules():
        if any(isinstance(vars(kind).get("ops"), LayerOps) for kind in type(module).__mro__):
            vars(module)["ops"] = ops


_ops_of = cache(Ops)
