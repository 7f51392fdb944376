"""Keep the experts of a step's tokens beside their keys, for the record that a trainer replays."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op, promising


@op
def keep_routing(experts: Tensor, write_index: Tensor, record: Tensor) -> None:
    """Write the experts of tokens to the places of their keys.

    Args:
        experts: int32 `[layers, tokens or more, topk]`, contiguous: by number of the layer.
        write_index: int64 `[tokens]`: place of each token's keys in the flat KV cache; several
            dummies may have the same.
        record: uint8 or int16 `[places, layers, topk]`, contiguous, changed there.
    """
    record[write_index] = experts[:, : len(write_index)].transpose(0, 1).to(record.dtype)


@keep_routing.gpu
@promising("invariant")
def keep_routing_gpu(experts: Tensor, write_index: Tensor, record: Tensor) -> None:
    layers, tokens, topk = experts.shape
    _keep_routing_kernel[(len(write_index),)](
        experts, write_index, record, tokens * topk, layers, topk,
        triton.next_power_of_2(layers * topk), **launch_options(experts),
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride"])
def _keep_routing_kernel(
    experts: tl.tensor,
    write_index: tl.tensor,
    record: tl.tensor,
    stride: tl.tensor,
    layers: tl.constexpr,
    topk: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One token: all its layers."""
    wait_for_previous(overlap)
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(write_index + token)
    at = tl.arange(0, tile)
    inside = at < layers * topk
    source = experts + (at // topk).to(tl.int64) * stride + token * topk + at % topk
    chosen = tl.load(source, inside, other=0)
    tl.store(record + place * layers * topk + at, chosen.to(record.dtype.element_ty), inside)
