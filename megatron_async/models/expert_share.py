"""Which experts of a model this rank has. Imports no Megatron, so that readers of checkpoints that
only describe a model stay cheap."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def local_experts(model: nn.Module) -> tuple[int, int] | None:
    """The first of the experts that this rank has of a model, and how many; None: it has none."""
    for module in model.modules():
        experts: Any = module
        if hasattr(module, "first_expert"):  # `moe_experts.Experts`
            return experts.first_expert, experts.linear_fc1.weight.size(0)
    return None


def expert_parts(model: nn.Module, name: str, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """A parameter's parts that belong to one expert each, with a suffix that tells the expert's
    number; a parameter of no expert is one part without a suffix."""
    share = local_experts(model) if ".mlp.experts." in name else None
    if share is None:
        return [("", parameter)]
    return [(f".{share[0] + index}", part) for index, part in enumerate(parameter)]
