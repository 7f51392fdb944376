"""`expert_mlp` on a CPU by weights that are kept as a GGUF file's blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async.ops.experts.expert_mlp import ExpertWeight, expert_mlp
from megatron_async.ops.experts.expert_routing import Routing
from megatron_async.ops.linear.activations import SWIGLU, Gating
from megatron_async.ops.linear.cpu.grouped_weight import GroupedExperts
from megatron_async.ops.linear.cpu.helpers import CHUNK_BYTES, helpers_of

MOST_TOKENS = 256
"""Tokens that are computed at once: room for their pairs stays in the tens of MB."""


@expert_mlp.cpu
def expert_mlp_cpu(
    x: Tensor,
    routing: Routing,
    fc1: ExpertWeight,
    fc2: ExpertWeight,
    first_expert: int,
    num_experts: int,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    gating: Gating = SWIGLU,
) -> Tensor:
    is_kept = isinstance(fc1, GroupedExperts) and isinstance(fc2, GroupedExperts)
    if not is_kept or bias1 is not None or bias2 is not None or gating != SWIGLU:
        more = bias1, bias2, gating
        return expert_mlp.reference(x, routing, fc1, fc2, first_expert, num_experts, *more)
    assert isinstance(fc1, GroupedExperts)
    assert isinstance(fc2, GroupedExperts)
    x, shape = x.contiguous(), (first_expert, fc1.shape, fc2.shape)
    out = torch.empty_like(x)
    for first in range(0, len(x), MOST_TOKENS):
        part = slice(first, first + MOST_TOKENS)
        chosen, shares = routing.experts[part].contiguous(), routing.weights[part].contiguous()
        _run(x[part], chosen, shares, fc1.weight, fc2.weight, *shape, out[part])
    return out


def _run(
    x: Tensor, chosen: Tensor, shares: Tensor, fc1: Any, fc2: Any, first_expert: int,
    up: tuple[int, int, int], down: tuple[int, int, int], out: Tensor,
) -> None:  # fmt: skip
    from megatron_async.ops.experts.cpu import expert_loops

    (tokens, topk), (local, hidden, ffn), outputs = chosen.shape, down, up[1]
    pairs = tokens * topk
    wide = max(fc1.row_bytes, fc2.row_bytes)
    parts = [
        8 * (2 * local + 1 + pairs), tokens * fc1.row_bytes, pairs * wide,
        *(4 * pairs * width for width in (outputs, ffn, hidden)),
    ]  # fmt: skip
    room = torch.empty(sum(part + -part % 64 for part in parts), dtype=torch.uint8)
    places, at = [], room.data_ptr()
    for part in parts:
        places.append(at)
        at += part + -part % 64
    sizes = (tokens, topk, hidden, ffn, int(outputs == 2 * ffn), first_expert, local)
    weights = (fc1.address, fc1.record.address, fc2.address, fc2.record.address)
    addresses = (
        x.data_ptr(), chosen.data_ptr(), shares.data_ptr(), out.data_ptr(), *places,
    )  # fmt: skip
    with helpers_of(torch.get_num_threads()).held() as (control, least):
        expert_loops.expert_mlp(control, least, CHUNK_BYTES, sizes, weights, addresses)
