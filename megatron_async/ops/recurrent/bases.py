"""The base of each row's state, before and after a step.

Computed once a step, for all recurrent layers: they share their bases, because the flush rule
depends only on positions (`FlushRule`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op, promising
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows

TILE = 128


@op(cpu="recurrent.cpu.host_recurrent")
def next_bases(
    base: Tensor,
    row_index: Tensor,
    positions: Tensor,
    width: int,
    prefill: PrefillRows | None,
    rule: FlushRule,
) -> tuple[Tensor, Tensor]:
    """Find the bases of a step's rows and store what they are after it.

    Args:
        base: int32 `[pool rows]`: tokens that are in a row's state; changed in place.
        row_index: int32 or int64 `[decode rows]`: pool row of each decode row.
        positions: int64 `[decode rows * width]` or more: of their query tokens. Where the first is
            0, the row brings nothing (it is a dummy, or its request is at its limit), and its base
            stays.
        width: query tokens of a decode row.
        prefill: the step's prefill chunks, None where there are none.
        rule: when inputs move into the state.

    Returns:
        int32 `[decode rows + chunks]` each: the bases before and after the step. A chunk's bases
        are its first position, and the position that the written state stands at: the chunk's end,
        or for the last one of a prompt where `rule` says, but not before the chunk. With a rule
        that replays, the borders before these.

    Raises:
        ValueError: sizes do not match.
    """
    decode_rows, _chunks = _sizes(row_index, positions, width, prefill, rule)

    def flushed(end: Tensor) -> Tensor:
        return (end - rule.lag).clamp(min=0) // rule.period * rule.period

    first = positions[: decode_rows * width : width].to(torch.int32)
    before = base[row_index]
    after = torch.where(first > 0, torch.maximum(before, flushed(first)), before)
    base[row_index] = after
    if prefill is None:
        return before, after
    first = prefill.first_positions.to(torch.int32)
    lengths = prefill.starts.diff().to(torch.int32)
    end = first + lengths
    is_last = prefill.is_last.to(torch.bool)
    due = flushed(end)
    if rule.replays:
        first, end = (place // rule.period * rule.period for place in (first, end))
    behind = torch.where(is_last, torch.maximum(first, due), end)
    base[prefill.write_rows] = torch.where(lengths > 0, behind, base[prefill.write_rows])
    return torch.cat((before, first)), torch.cat((after, behind))


@next_bases.gpu
@promising("invariant")
def next_bases_gpu(
    base: Tensor,
    row_index: Tensor,
    positions: Tensor,
    width: int,
    prefill: PrefillRows | None,
    rule: FlushRule,
) -> tuple[Tensor, Tensor]:
    decode_rows, chunks = _sizes(row_index, positions, width, prefill, rule)
    total = decode_rows + chunks
    before, after = torch.empty((2, total), dtype=torch.int32, device=base.device)
    if total:
        chunk = PrefillRows(base, base, base, base, base) if prefill is None else prefill
        _next_bases_kernel[(triton.cdiv(total, TILE),)](
            base,
            row_index,
            positions,
            chunk.starts,
            chunk.first_positions,
            chunk.write_rows,
            chunk.is_last,
            before,
            after,
            decode_rows,
            chunks,
            width,
            period=rule.period,
            lag=rule.lag,
            replays=rule.replays,
            tile=TILE,
            **launch_options(base),
        )
    return before, after


def _sizes(
    row_index: Tensor, positions: Tensor, width: int, prefill: PrefillRows | None, rule: FlushRule
) -> tuple[int, int]:
    """Decode rows and chunks."""
    rule.check()
    decode_rows = row_index.numel()
    if positions.numel() < decode_rows * width:
        raise ValueError(
            f"next_bases: {decode_rows} decode rows of {width} query tokens want as many "
            f"positions; found {positions.numel()}."
        )
    if prefill is None:
        return decode_rows, 0
    chunks = prefill.write_rows.numel()
    if prefill.starts.numel() != chunks + 1 or prefill.first_positions.numel() != chunks:
        raise ValueError(
            f"next_bases: {chunks} chunks want {chunks + 1} starts and as many first positions; "
            f"found {prefill.starts.numel()} and {prefill.first_positions.numel()}."
        )
    return decode_rows, chunks


# Where decode rows end varies, and with it what is aligned; every count would compile its own.
@triton.jit(
    do_not_specialize=["decode_rows", "chunks", "width"],
    do_not_specialize_on_alignment=[
        "row_index",
        "positions",
        "starts",
        "first_positions",
        "write_rows",
        "is_last",
    ],
)
def _next_bases_kernel(
    base: tl.tensor,
    row_index: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    first_positions: tl.tensor,
    write_rows: tl.tensor,
    is_last: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    decode_rows: tl.tensor,
    chunks: tl.tensor,
    width: tl.tensor,
    period: tl.constexpr,
    lag: tl.constexpr,
    replays: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    number = tl.program_id(0) * tile + tl.arange(0, tile)
    decodes = number < decode_rows
    chunk = number - decode_rows
    prefills = (chunk >= 0) & (chunk < chunks)

    first = tl.load(positions + number * width, mask=decodes, other=0).to(tl.int32)
    row = tl.load(row_index + number, mask=decodes, other=0).to(tl.int64)
    found = tl.load(base + row, mask=decodes, other=0)
    flushed = tl.maximum(first - lag, 0) // period * period
    moved = tl.where(first > 0, tl.maximum(found, flushed), found)

    start = tl.load(starts + chunk, mask=prefills, other=0)
    length = tl.load(starts + chunk + 1, mask=prefills, other=0) - start
    begin = tl.load(first_positions + chunk, mask=prefills, other=0)
    last = tl.load(is_last + chunk, mask=prefills, other=0) != 0
    end = begin + length
    flushed = tl.maximum(end - lag, 0) // period * period
    if replays:
        begin, end = begin // period * period, end // period * period
    behind = tl.maximum(begin, flushed)
    behind = tl.where(last, behind, end)

    target = tl.load(write_rows + chunk, mask=prefills, other=0).to(tl.int64)
    target = tl.where(decodes, row, target)
    result = tl.where(decodes, moved, behind)
    tl.store(before + number, tl.where(decodes, found, begin), mask=decodes | prefills)
    tl.store(after + number, result, mask=decodes | prefills)
    stored = (decodes & (first > 0)) | (prefills & (length > 0))
    tl.store(base + target, result, mask=stored)
