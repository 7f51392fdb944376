"""What recurrent layers do once a step on a CPU, with the signatures of the references: new bases,
and inputs that move from the rings into the states."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.ops.cpu.recurrent.host_recurrent import ONES
from megatron_async.ops.recurrent import bases
from megatron_async.ops.recurrent import flush as flushing
from megatron_async.ops.recurrent.bases import next_bases
from megatron_async.ops.recurrent.flush import flush
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows, RecurrentPools


@next_bases.cpu
def next_bases_cpu(
    base: Tensor,
    row_index: Tensor,
    positions: Tensor,
    width: int,
    prefill: PrefillRows | None,
    rule: FlushRule,
) -> tuple[Tensor, Tensor]:
    """`ops/recurrent/bases.py`: the bases of a step's rows before and after it. A step with prefill
    chunks is the reference's.

    Args:
        base: int32 `[pool rows]`, changed.
        row_index, positions, width, prefill, rule: of the step.

    Raises:
        IndexError: there is no such pool row.
        ValueError: there are too few positions.
    """
    rows = row_index.numel()
    serves = (
        prefill is None
        and base.dtype == torch.int32
        and positions.dtype == torch.int64
        and row_index.dtype in (torch.int32, torch.int64)
        and positions.numel() >= rows * width
        and all(tensor.is_contiguous() for tensor in (base, row_index, positions))
    )
    if not serves:
        return bases.next_bases.reference(base, row_index, positions, width, prefill, rule)
    from megatron_async.ops.cpu.recurrent import flush_kernels

    rule.check()
    before, after = torch.empty((2, rows), dtype=torch.int32)
    flush_kernels.next_bases(
        base.data_ptr(), base.numel(), row_index.data_ptr(), row_index.dtype == torch.int64,
        positions.data_ptr(), rows, width, rule.period, rule.lag, before.data_ptr(),
        after.data_ptr(),
    )  # fmt: skip
    return before, after


def _serves(
    pools: RecurrentPools, row_index: Tensor, before: Tensor, after: Tensor, saves: Tensor | None
) -> bool:
    """Whether the loop takes these tensors: pools of one dtype, which fit each other."""
    state, ring_xb, ring_gates, conv = pools
    layers, count, heads, size, columns = state.shape
    shared = ring_xb.size(3) - heads * size
    of_step = (before, after) if saves is None else (before, after, saves)
    return (
        state.dtype in ONES
        and all(pool.dtype == state.dtype for pool in pools)
        and all(pool.shape[:2] == (layers, count) for pool in pools)
        and ring_gates.shape[2:] == (ring_xb.size(2), ring_gates.size(3), heads)
        and shared > 0
        and shared % columns == 0
        and heads % (shared // columns) == 0
        and all(pool.is_contiguous() or pool[0, 0].is_contiguous() for pool in pools)
        and row_index.dtype in (torch.int32, torch.int64)
        and all(tensor.dtype == torch.int32 for tensor in of_step)
        and all(tensor.numel() >= row_index.numel() for tensor in of_step)
        and all(tensor.is_contiguous() for tensor in (row_index, *of_step))
        and conv.dim() == 4
    )


@flush.cpu
def flush_cpu(
    pools: RecurrentPools,
    row_index: Tensor,
    base_before: Tensor,
    base_after: Tensor,
    rule: FlushRule,
    saves: Tensor | None = None,
) -> None:
    """`ops/recurrent/flush.py`: the states of decode rows at their new bases.

    Args:
        pools: of all layers, of one dtype, float32 or float64, for the loop; changed.
        row_index, base_before, base_after, rule, saves: of the step.

    Raises:
        IndexError: the pools do not have a row.
    """
    rows = row_index.numel()
    if not rows:
        return
    if not _serves(pools, row_index, base_before, base_after, saves):
        flushing.flush.reference(pools, row_index, base_before, base_after, rule, saves)
        return
    from megatron_async.ops.cpu.recurrent import flush_kernels

    state, ring_xb, ring_gates, conv = pools
    layers, count, heads, lanes, columns = state.shape
    size = state.element_size()
    step = row_index, base_before, base_after, base_after if saves is None else saves
    flush_kernels.flush(
        tuple(tensor.data_ptr() for tensor in (*pools, *step)),
        tuple(size * pool.stride(0) for pool in pools),
        tuple(size * pool.stride(1) for pool in pools),
        (
            layers, rows, count, heads, lanes, columns, ring_gates.size(3), ring_xb.size(3),
            ring_xb.size(2), conv.size(2) * conv.size(3), size,
        ),
        row_index.dtype == torch.int64,
        saves is not None,
        ONES[state.dtype],
    )  # fmt: skip


def compile_loops(dtype: torch.dtype = torch.float32) -> None:
    """Compile both, the flush for float32 or float64, by calls for a dummy row of the smallest
    layer."""
    rule, base = FlushRule(), torch.zeros(1, dtype=torch.int32)
    index, one = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 1, 1, 1, dtype=dtype)
    pools = RecurrentPools(one, torch.zeros(1, 1, 1, 2, dtype=dtype), one, one[0])
    flush_cpu(pools, index, *next_bases_cpu(base, index, index, 1, None, rule), rule)
