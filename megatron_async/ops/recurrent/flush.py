"""Moves inputs from the rings into the states: once a step, for all recurrent layers of a kind.

A state is due in one step of 16 (`FlushRule`). A separate kernel moves the inputs, so the layers'
decode kernels only read states and need half the registers. On an H200, 256 rows of
Nemotron-3-Nano's layer take 168 us including this kernel's share, and took 272 when decode kernels
wrote the states (docs/records/hybrid.md, 2026-11-22).

The state is S `[heads, rows of the head, columns]`. A token adds `gain * left right^T` to it and
leaves exp(decay) of what was there before. Mamba-2 (Dao and Gu 2024): left is x, right is B, the
gain is dt. Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): left is the pseudo value, right the
key, the gain is 1. That inputs wait in a ring is ReplaySSM's idea (Dao AI Lab and NVIDIA 2026).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import await_previous, launch_options
from megatron_async.ops.op import op, promising
from megatron_async.ops.recurrent.delta_tile import moved
from megatron_async.ops.recurrent.kernel_parts import add_products, decays_of
from megatron_async.ops.recurrent.mamba_tile import advanced
from megatron_async.ops.recurrent.recurrent_pools import (
    MAX_WIDTH,
    FlushRule,
    RecurrentPools,
    RowStrides,
    wide_dtype,
)
from megatron_async.ops.recurrent.reference_parts import ring_inputs

ENTRIES = tl.constexpr(16)
"""Inputs that move into the state together: the least depth of a product."""
STATE_TILE = 4096
"""Elements of the state that a program holds; twice as many of Gated DeltaNet's with a rule that
replays, whose programs make T for all lanes of theirs (256 rows of Qwen3-Next's layer: 47 -> 42 us,
an H200, 2026-11-29)."""
PROGRAMS = 16
"""For each layer and each group of rows."""
ROWS, GROUPS = 4, 4
"""Most rows that a program looks after, and into how many groups rows are divided at least. Most
rows are not due. With a program for each row, a step of 64 in which none was due took 35 us of
Granite-4.0-H-350M's 1.36 ms; with 16 rows a program, 256 rows that are due at once took longer
(Nemotron-H-8B's step 14.8 ms, with 4 14.4; an H200, 2026-11-24)."""


class FlushSizes(NamedTuple):
    """Constants of the kernel: sizes of a layer and of its pools, and a program's share."""

    heads: int
    head_dim: int
    columns: int
    """Columns of a head's state."""
    channels: int
    """Channels of `ring_xb`."""
    ring: int
    """Entries of the rings."""
    gates: int
    inputs: int
    """Numbers of a row of `conv`."""
    parts: int
    """Programs of a layer."""
    lanes: int
    turns: int
    """Times `ENTRIES` inputs are moved."""
    has_saves: bool
    is_exact: bool
    tile: int
    """Tokens of a tile that moves whole, with a rule that replays; 0: with another."""
    is_delta: bool
    """Whether it is Gated DeltaNet's: keys, then values, whose pseudo values are computed."""


@op(cpu="recurrent.cpu.host_recurrent")
def flush(
    pools: RecurrentPools,
    row_index: Tensor,
    base_before: Tensor,
    base_after: Tensor,
    rule: FlushRule,
    saves: Tensor | None = None,
) -> None:
    """Bring the states of a step's decode rows to their new bases, and keep some of them.

    Args:
        pools: of all layers, each `[layers, rows, ...]`; `state` is changed in place.
        row_index: int32 or int64 `[decode rows]`: pool row of each decode row, all different but
            for rows whose bases are equal.
        base_before, base_after: int32 `[decode rows]` or more, of `next_bases`: a state holds the
            tokens before the one, and the rings those from there to the other.
        rule: when inputs move into the state; as for `next_bases`. From one step to the next
            a base moves by a period, or by a row's query tokens if they are more.
        saves: int32 `[decode rows]` or more: pool row that gets a copy of the row's state at its
            new base, and of the inputs of its convolution; -1: none does. They are no decode row's.
            A copy is of use where the row's first query token stands at the new base.
    """
    rows = row_index.numel()
    before, after = base_before[:rows], base_after[:rows]
    due = after > before
    if due.any():
        row = row_index[due].to(torch.int64)
        _flush_rows(pools, row, before[due, None], after[due, None])
    if saves is not None:
        kept = saves[:rows] >= 0
        source, target = row_index[kept].to(torch.int64), saves[:rows][kept].to(torch.int64)
        for pool in (pools.state, pools.conv):
            pool[:, target] = pool[:, source]


@flush.gpu
@promising("invariant")
def flush_gpu(
    pools: RecurrentPools,
    row_index: Tensor,
    base_before: Tensor,
    base_after: Tensor,
    rule: FlushRule,
    saves: Tensor | None = None,
) -> None:
    rows, (layers, _rows, heads, size, columns) = row_index.numel(), pools.state.shape
    if not rows:
        return
    held = 2 * STATE_TILE if rule.is_delta else STATE_TILE
    lanes = max(min(held // columns, triton.next_power_of_2(size)), 16)
    parts = min(PROGRAMS, heads)
    block = min(triton.next_power_of_2(triton.cdiv(rows, GROUPS)), ROWS)
    sizes = FlushSizes(
        heads,
        size,
        columns,
        channels=pools.ring_xb.size(3),
        ring=pools.ring_xb.size(2),
        gates=pools.ring_gates.size(3),
        inputs=pools.conv.size(2) * pools.conv.size(3),
        parts=parts,
        lanes=lanes,
        turns=1 if rule.replays else triton.cdiv(max(rule.period, MAX_WIDTH), ENTRIES.value),
        has_saves=saves is not None,
        is_exact=pools.ring_xb.dtype == torch.float32,
        tile=rule.period if rule.replays else 0,
        is_delta=rule.is_delta,
    )
    _flush_kernel[(layers * parts, triton.cdiv(rows, block))](
        pools,
        RowStrides(*(pool.stride(0) for pool in pools)),
        RowStrides(*(pool.stride(1) for pool in pools)),
        row_index,
        base_before,
        base_after,
        base_after if saves is None else saves,
        rows,
        sizes=sizes,
        block=block,
        num_warps=4,
        **launch_options(row_index),
    )


def _flush_rows(pools: RecurrentPools, row: Tensor, before: Tensor, after: Tensor) -> None:
    for state, ring, gates in zip(pools.state, pools.ring_xb, pools.ring_gates):
        wide = wide_dtype(ring.dtype)
        left, right, decay, gain = ring_inputs((state, ring, gates), row[:, None], before, after)
        left_over = decay.flip(1).cumsum(1).flip(1)
        weight = gain * (left_over - decay).exp()
        added = torch.einsum("rihp,rihn->rhpn", left * weight[..., None], right)
        kept = state[row].to(wide) * left_over[:, 0].exp()[..., None, None]
        state[row] = (kept + added).to(state.dtype)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["row_index", "base_before", "base_after", "saves"],
)
def _flush_kernel(
    pools: tl.tuple,
    layer_strides: tl.tuple,
    row_strides: tl.tuple,
    row_index: tl.tensor,
    base_before: tl.tensor,
    base_after: tl.tensor,
    saves: tl.tensor,
    rows: tl.tensor,
    sizes: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    # The next kernel starts when this one has ended: the layers' kernels read states before their
    # own wait, and in a later stage of a pipeline no kernel that waits first is between.
    await_previous(overlap)
    first = tl.program_id(1) * block
    each = first + tl.arange(0, block)
    begin = tl.load(base_before + each, mask=each < rows, other=0)
    end = tl.load(base_after + each, mask=each < rows, other=0)
    wanted = end > begin
    if sizes.has_saves:
        wanted = wanted | (tl.load(saves + each, mask=each < rows, other=-1) >= 0)
    last = tl.max(tl.where(wanted, each + 1, 0))
    for row in range(first, last):
        _flush_row(
            row, pools, layer_strides, row_strides, row_index, base_before, base_after, saves, sizes
        )


@triton.jit
def _flush_row(
    row: tl.tensor,
    pools: tl.tuple,
    layer_strides: tl.tuple,
    row_strides: tl.tuple,
    row_index: tl.tensor,
    base_before: tl.tensor,
    base_after: tl.tensor,
    saves: tl.tensor,
    sizes: tl.constexpr,
) -> None:
    """A program's part of a row, if the row is due or is to be kept.

    A row that is neither has no units. It is not left out by a branch: in a loop, Triton 3.6 lets
    the loads of the next turn overwrite what a product in a branch reads (docs/records/hybrid.md).
    """
    heads: tl.constexpr = sizes.heads
    head_dim: tl.constexpr = sizes.head_dim
    columns: tl.constexpr = sizes.columns
    channels: tl.constexpr = sizes.channels
    parts: tl.constexpr = sizes.parts
    lanes: tl.constexpr = sizes.lanes
    entries: tl.constexpr = sizes.tile if sizes.tile else ENTRIES
    turns: tl.constexpr = sizes.turns
    before, after = tl.load(base_before + row), tl.load(base_after + row)
    save_row = tl.full((), -1, tl.int64)
    if sizes.has_saves:
        save_row = tl.load(saves + row).to(tl.int64)
    wanted = (after > before) | (save_row >= 0)
    pool_row = tl.load(row_index + row).to(tl.int64)
    layer = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    state = pools.state + layer * layer_strides.state
    kept = state + save_row * row_strides.state
    state += pool_row * row_strides.state
    ring_xb = pools.ring_xb + (layer * layer_strides.ring_xb + pool_row * row_strides.ring_xb)
    ring_gates = pools.ring_gates
    ring_gates += layer * layer_strides.ring_gates + pool_row * row_strides.ring_gates
    group_heads: tl.constexpr = heads * columns // (channels - heads * head_dim)
    tiles: tl.constexpr = (head_dim + lanes - 1) // lanes
    first_left: tl.constexpr = channels - heads * head_dim if sizes.is_delta else 0
    number, column = tl.arange(0, entries), tl.arange(0, columns)
    for unit in range(part, tl.where(wanted, heads * tiles, 0), parts):
        head = unit // tiles
        lane = unit % tiles * lanes + tl.arange(0, lanes)
        inside = lane < head_dim
        place = state + (head * head_dim + lane)[:, None] * columns + column[None, :]
        in_state = inside[:, None] & (column >= 0)[None, :]
        stored = tl.load(place, mask=in_state, other=0.0)
        s = stored.to(tl.float32)
        right_channel = heads * head_dim + head // group_heads * columns
        if sizes.is_delta:
            right_channel -= heads * head_dim
        for turn in tl.static_range(turns):
            position = before + turn * entries + number
            due = position < after
            entry = position % sizes.ring
            gate = ring_gates + entry * (sizes.gates * heads) + head
            decay = tl.load(gate, mask=due, other=0.0)
            if sizes.tile:
                gain = tl.load(gate + heads, mask=due, other=0.0)
            else:
                weight = tl.exp(tl.sum(decay, 0) - tl.cumsum(decay, 0))
                if sizes.gates > 1:
                    weight *= tl.load(gate + heads, mask=due, other=0.0)
            source = ring_xb + entry * channels
            left = tl.load(
                source[None, :] + (first_left + head * head_dim + lane)[:, None],
                mask=inside[:, None] & due[None, :],
                other=0.0,
            )
            right = tl.load(
                source[:, None] + right_channel + column[None, :], mask=due[:, None], other=0.0
            )
            if sizes.is_delta:
                beta, values = decay, tl.trans(left)
                s = moved(tl.trans(s), right, values, beta, gain, entries)
                s = tl.trans(s)
            elif sizes.tile:
                x, total = tl.trans(left), decays_of(decay)
                s = advanced(tl.trans(s), x, right, gain, total, entries, sizes.is_exact)
                s = tl.trans(s)
            else:
                weighed = right.to(tl.float32) * weight[:, None]
                s = add_products(s * tl.exp(tl.sum(decay, 0)), left, weighed, sizes.is_exact)
        tl.store(place, s.to(stored.dtype), mask=in_state)
        if sizes.has_saves:
            copy = kept + (head * head_dim + lane)[:, None] * columns + column[None, :]
            tl.store(copy, s.to(stored.dtype), mask=in_state & (save_row >= 0))
    if save_row >= 0:
        conv = pools.conv + layer * layer_strides.conv
        for begin in range(part * lanes * 16, sizes.inputs, parts * lanes * 16):
            element = begin + tl.arange(0, lanes * 16)
            there = element < sizes.inputs
            given = tl.load(conv + pool_row * row_strides.conv + element, mask=there)
            tl.store(conv + save_row * row_strides.conv + element, given, mask=there)
