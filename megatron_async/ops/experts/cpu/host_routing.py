"""`route` on a CPU by a loop that Numba compiles: plain torch launches a dozen small operations,
which take longer than the products of a small layer's experts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_async.ops.cpu.rows import serves
from megatron_async.ops.experts.expert_routing import Routing, check, route


@route.cpu
def route_cpu(
    x: Tensor,
    weight: Tensor,
    topk: int,
    pre_softmax: bool,
    places: Tensor | None = None,
    dummy_place: int = 0,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    logit_bias: Tensor | None = None,
) -> Routing:
    whole = places is None or (places.dtype == torch.int64 and places.is_contiguous())
    if not (whole and serves(x, weight, bias, logit_bias)):
        return route.reference(
            x, weight, topk, pre_softmax, places, dummy_place, sigmoid, bias, scale, logit_bias
        )
    from megatron_async.ops.experts.cpu import expert_loops

    check(x, weight, topk, sigmoid, bias, logit_bias)
    tokens = len(x)
    experts = torch.empty((tokens, topk), dtype=torch.int32)
    weights = torch.empty((tokens, topk), dtype=torch.float32)
    sizes = (tokens, x.size(1), len(weight), topk, -1 if places is None else len(places))
    others = (0 if each is None else each.data_ptr() for each in (logit_bias, bias, places))
    addresses = (
        x.data_ptr(), weight.data_ptr(), *others, experts.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    kind = expert_loops.SIGMOID if sigmoid else int(pre_softmax)
    expert_loops.route(addresses, sizes, dummy_place, kind, np.float32(scale))
    return Routing(experts, weights)
