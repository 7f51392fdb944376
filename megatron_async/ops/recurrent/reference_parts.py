"""What the references of recurrent layers share: the causal convolution with its history (Mamba-2
has a bias, Gated DeltaNet none), what the rings hold, a step's query tokens, and the chunks of a
prefill.

The arithmetic is float32 (float64 for float64 inputs), in the kernels' order of thought: a decode
step adds what the rings hold to what the state gives, a scan is cut at multiples of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.recurrent.recurrent_pools import (
    CONV_WIDTH,
    GRID,
    DecodeRows,
    PrefillRows,
    RecurrentPools,
    wide_dtype,
)


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[..., 3 + tokens, channels]`, the tokens' inputs behind the three before them, to `[...,
    tokens, channels]`, after SiLU, in its dtype.

    In float64: torch computes the last few elements of a tensor by other code than the rest, and a
    token's numbers must not depend on how many others there are.
    """
    windows = inputs.to(torch.float64).unfold(-2, CONV_WIDTH, 1)
    value = (windows * weight.view(-1, CONV_WIDTH).to(torch.float64)).sum(-1)
    if bias is not None:
        value = value + bias.to(torch.float64)
    return F.silu(value).to(inputs.dtype)


def with_history(raw: Tensor, conv: Tensor, row: Tensor | int, first: Tensor | int) -> Tensor:
    """Inputs `[rows, tokens, channels]`, which begin at positions `first` `[rows, 1]` of pool rows
    `row` `[rows, 1]`, behind the three before them (0 before position 0): `[rows, 3 + tokens,
    channels]`. Of one row, given by numbers, without the first dimension."""
    earlier = first + torch.arange(1 - CONV_WIDTH, 0, device=raw.device)
    history = conv[row, earlier % conv.size(1)]
    return torch.cat((torch.where((earlier >= 0)[..., None], history, 0), raw), -2)


def ring_inputs(
    pools: Sequence[Tensor], row: Tensor, begin: Tensor, end: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the rings of a layer hold for the tokens `begin` to `end` - 1, `[rows, 1]` each; 0
    behind them: left `[rows, ring, heads, size]`, right `[rows, ring, heads, columns]`, decay and
    gain `[rows, ring, heads]`, all wide."""
    state, ring, gates = pools[:3]
    heads, size, columns = state.shape[1:]
    wide = wide_dtype(ring.dtype)
    position = begin + torch.arange(ring.size(1), device=begin.device)
    exists = (position < end)[..., None]
    entry = position % ring.size(1)
    inputs = torch.where(exists, ring[row, entry], 0).to(wide)
    left, right = inputs.split([heads * size, inputs.size(2) - heads * size], dim=2)
    right = right.unflatten(2, (-1, columns))
    right = right.repeat_interleave(heads // right.size(2), dim=2)
    of_tokens = torch.where(exists[..., None], gates[row, entry], 0)
    decay = of_tokens[:, :, 0]
    gain = of_tokens[:, :, 1] if gates.size(2) > 1 else exists.to(wide).expand_as(decay)
    return left.unflatten(2, (heads, size)), right, decay, gain


class Queries(NamedTuple):
    """The query tokens of a step's decode rows."""

    row: Tensor
    """int64 `[rows, 1]`: pool rows."""
    first: Tensor
    """int64 `[rows, 1]`: position of the rows' first query tokens; 0: the row brings nothing."""
    at: Tensor
    """int64 `[rows, width]`: positions, if all were brought."""
    brought: Tensor
    """bool `[rows, width]`."""

    def tokens(self, inputs: Tensor) -> Tensor:
        """Decode rows of a step's inputs `[tokens, columns]`, as `[rows, width, columns]`."""
        return inputs[: self.at.numel()].unflatten(0, tuple(self.at.shape))

    def states(self, pools: RecurrentPools, dtype: torch.dtype) -> Tensor:
        """The rows' states in a dtype; 0 for rows that bring nothing."""
        is_fed = (self.first > 0)[..., None, None]
        return torch.where(is_fed, pools.state[self.row[:, 0]], 0).to(dtype)

    def store(self, pools: RecurrentPools, conv: Tensor, ring_xb: Tensor, gates: Tensor) -> None:
        """Put what the tokens bring into the pools: `[rows, width, ...]` each."""
        for pool, values in ((pools.conv, conv), (pools.ring_xb, ring_xb), (pools[2], gates)):
            place = self.row, self.at % pool.size(1)
            is_new = self.brought.view(*self.brought.shape, *(1,) * (pool.dim() - 2))
            pool[place] = torch.where(is_new, values, pool[place])


def queries_of(step: DecodeRows) -> Queries:
    """The query tokens of decode rows."""
    rows, width = step.row_index.numel(), step.width
    given = step.positions[: rows * width].view(rows, width)
    first = given[:, :1]
    at = first + torch.arange(width, device=given.device)
    return Queries(step.row_index.to(torch.int64)[:, None], first, at, (given == at) & (first > 0))


class Entries(NamedTuple):
    """What tokens add to a state: `left right^T`, times a gain, after decays."""

    left: Tensor
    """`[..., tokens, heads, rows of a head]`, wide."""
    right: Tensor
    """`[..., tokens, heads, columns]`, wide."""
    g: Tensor
    """`[..., tokens, heads]`: logarithms of the decays."""
    gain: Tensor | None
    """Like g; None: 1."""

    def cut(self, part: slice) -> Entries:
        """Some of the tokens."""
        gain = None if self.gain is None else self.gain[part]
        return Entries(self.left[part], self.right[part], self.g[part], gain)

    def added_to(self, state: Tensor) -> Tensor:
        """The state `[heads, rows of the head, columns]` after all of the tokens."""
        left, right, g = self.left[None], self.right[None], self.g[None]
        decay = g.cumsum(1)
        total = decay[:, -1:] if g.size(1) else g.new_zeros(1, 1, g.size(2))
        weight = (total - decay).exp()
        weight = weight if self.gain is None else weight * self.gain[None]
        added = torch.einsum("rihp,rihn->rhpn", left * weight[..., None], right)
        return (state[None] * total[:, 0].exp()[..., None, None] + added)[0]


class Chunk(NamedTuple):
    """A prefill chunk behind its convolution."""

    raw: Tensor
    """`[3 + tokens, conv_dim]`: inputs of the convolution, and the three before them."""
    scan: Callable[[Tensor, slice], tuple[Tensor, Entries, Tensor, Tensor]]
    """From a state and tokens up to the next multiple of 128: outputs `[tokens, heads, rows of a
    head]`, what the tokens add to the state, and what they leave in `ring_xb` and `ring_gates`."""


def prefill_reference(
    inputs: Tensor,
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    out: Tensor | None,
    chunk_dest: Tensor | None,
    outputs: int,
    convolved: Callable[[Tensor, int, int], Chunk],
) -> Tensor:
    """The prefill op of a kind of layer, with `outputs` channels of output. `convolved` makes a
    `Chunk` of a chunk's inputs, its read row and its first position."""
    y = inputs.new_zeros(inputs.size(0), outputs)
    y = y if out is None else out.zero_()
    numbers = torch.stack(
        (rows.starts[:-1], rows.starts[1:], rows.first_positions, rows.read_rows, rows.write_rows)
    )
    bases = base_after.tolist()  # sync-ok: CPU
    dests = [] if chunk_dest is None else chunk_dest.tolist()  # sync-ok: CPU
    for number, (start, end, first, read, write) in enumerate(
        numbers.t().tolist()  # sync-ok: CPU
    ):
        if start == end:
            continue
        count = -(-(first + end - start) // GRID) - first // GRID
        own_dests, dests = dests[:count], dests[count:]
        chunk = convolved(inputs[start:end], read, first)
        y[start:end] = _scan(chunk, pools, (first, read, write, bases[number]), own_dests)
    return y


def _scan(
    chunk: Chunk, pools: RecurrentPools, numbers: tuple[int, int, int, int], dests: list[int]
) -> Tensor:
    """Outputs of a chunk, given its first position, read row, write row and base."""
    first, read, write, base = numbers
    raw, wide = chunk.raw, wide_dtype(chunk.raw.dtype)
    end = first + len(raw) - CONV_WIDTH + 1
    state = pools.state[read].to(wide) if first else torch.zeros_like(pools.state[read], dtype=wide)

    def keep_inputs(behind: int, row: int) -> None:
        for position in range(max(behind + 1 - CONV_WIDTH, 0), behind):
            place = row, position % pools.conv.size(1)
            pools.conv[place] = raw[position - first + CONV_WIDTH - 1]

    outputs, at_base = [], state
    for begin in range(first // GRID * GRID, end, GRID):
        cut = slice(max(begin - first, 0), min(begin + GRID, end) - first)
        y, entries, ring_xb, gates = chunk.scan(state, cut)
        outputs.append(y)
        for position in range(max(base, first + cut.start), first + cut.stop):
            place, local = (write, position % pools.ring_xb.size(1)), position - first - cut.start
            pools.ring_xb[place], pools.ring_gates[place] = ring_xb[local], gates[local]
        if begin <= base < begin + GRID:
            at_base = entries.cut(slice(max(base - first - cut.start, 0))).added_to(state)
        state = entries.added_to(state)
        dest = dests[begin // GRID - first // GRID] if dests else -1
        if dest >= 0 and begin + GRID <= end:
            pools.state[dest] = state
            keep_inputs(begin + GRID, dest)
    pools.state[write] = state if base == end else at_base
    keep_inputs(end, write)
    return torch.cat(outputs).flatten(1).to(raw.dtype)
