"""What all recurrent layers share: a layer's pools by row, the flush rule, a step's rows and
chunks, and the checks of these.

A row is what one sequence keeps in a recurrent layer. The state is written every few tokens only:
`state` holds the recurrence after the first `base` tokens, and rings hold what the tokens since
add to it (ReplaySSM, Dao AI Lab and NVIDIA 2026). A token at position t lies at t modulo the
ring's length. So tokens are taken back by starting the next step at an earlier position: nothing
is copied and nothing is zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CONV_WIDTH = 4
"""Inputs that a token's convolution sees: its own and the three before."""
GRID = 128
"""Scans of a prompt are cut at multiples of this position, whatever the batch."""
TILE = 64
"""Tokens of a scan's tile with inputs of 16 bits; a divisor of `GRID`."""
DELTA_TILE = 16
"""Tokens of Gated DeltaNet's tile with a rule that replays."""
MAX_WIDTH = 8
"""Query tokens that a decode row may have."""


class FlushRule(NamedTuple):
    """When inputs move from the rings into the state.

    A step whose first query token is at position P brings the state to the last multiple of
    `period` that is at most P - lag. The phase depends on the position alone, not on the slot or
    the batch, and the inputs it needs are those of earlier steps.
    """

    period: int = 16
    """Tokens between flushes: a power of two that divides 128."""
    lag: int = 0
    """Tokens that may still be taken back, in tokens before a step's first query token."""
    replays: bool = False
    """Whether a token's bits are those of its sequence alone (`replaying_rule`)."""
    is_delta: bool = False
    """Whether, besides, layers are Gated DeltaNet's, whose rings have values then."""

    def ring_length(self, width: int) -> int:
        """The fewest entries of `ring_xb` and `ring_gates`, for rows of up to `width` query tokens.

        The step that flushes still reads from the base that it found, which the step before left
        up to period + lag - 1 tokens behind its first query token; this one starts up to `width`
        later and writes `width` more.
        """
        return self.period + self.lag + 2 * width - 1

    def conv_length(self, width: int) -> int:
        """The fewest entries of `conv`: a step's own, and the history of one taken back."""
        return CONV_WIDTH - 1 + self.lag + width

    def window(self, width: int) -> int:
        """The most tokens between a step's base and its last query token, both included."""
        return self.period + self.lag + width - 1

    def check(self) -> None:
        """Raise ValueError unless the period divides 128 and the lag is 0 or more."""
        if self.period < 1 or GRID % self.period or self.lag < 0:
            raise ValueError(
                f"FlushRule: period {self.period} must be a power of two that divides {GRID} and "
                f"lag {self.lag} 0 or more: 16 and 0 suit most models."
            )


def replaying_rule(lag: int, tile: int = TILE) -> FlushRule:
    """The rule whose bits depend neither on chunks nor on what decodes beside, for layers whose
    tiles have so many tokens.

    All bases are borders of a scan's tiles, and a tile is always computed whole, from the state at
    its border: by a decode step again for each of its tokens, and by a chunk that begins inside of
    it. The ring holds the tile's tokens from its border on. A chunk's read row stands at the
    border before the chunk. GPUs alone serve this rule, with inputs of 16 bits.
    """
    return FlushRule(tile, lag, replays=True, is_delta=tile == DELTA_TILE)


class RecurrentPools(NamedTuple):
    """One layer's memory. Rows may be strided, what lies in a row not; the last is the dummy row,
    which nothing reads or writes."""

    state: Tensor
    """float32 or bfloat16: the recurrence after the first base tokens. Mamba-2: `[rows, heads,
    head_dim, d_state]`; Gated DeltaNet: `[rows, value heads, value_dim, key_dim]`."""
    ring_xb: Tensor
    """`[rows, ring, channels]`, params dtype: the two vectors whose outer product a token adds to
    each head's state. Mamba-2: x (d_inner), then B (groups d_state), behind the convolution. Gated
    DeltaNet: the pseudo value u (value heads x value_dim), then the normalised key (key heads x
    key_dim)."""
    ring_gates: Tensor
    """`[rows, ring, gates, heads]`, float32. The first gate is the logarithm of what a token leaves
    of the state. Mamba-2 has a second, what its x is multiplied by: dt after bias and softplus."""
    conv: Tensor
    """`[rows, conv ring, conv_dim]`, params dtype: inputs of the convolution. Mamba-2: x, B and C;
    Gated DeltaNet: q, k and v."""

    @property
    def strides(self) -> RowStrides:
        """Strides of this layer's pools."""
        state, ring_xb, ring_gates, conv = self
        return RowStrides(state.stride(0), ring_xb.stride(0), ring_gates.stride(0), conv.stride(0))


class RowStrides(NamedTuple):
    """Elements from a row of each pool of a layer to the next."""

    state: int
    ring_xb: int
    ring_gates: int
    conv: int


class DecodeRows(NamedTuple):
    """The decode rows of a step; all on the device."""

    row_index: Tensor
    """int32 or int64 `[rows]`: pool row of each decode row, all different but for the dummy row."""
    positions: Tensor
    """int64 `[rows * width]` or more. Query tokens that do not follow the row's first are padding,
    and so are all where the first is 0: they write nothing and give 0."""
    bases: Tensor
    """int32 `[rows]` or more, of `next_bases`: the tokens that are in the states, which `flush` has
    brought there."""
    width: int
    """Query tokens of a row, 1 to 8."""


class PrefillRows(NamedTuple):
    """The prefill chunks of a step; all on the device, padded to the step's shape.

    A chunk whose two starts are equal is padding: nothing is read or written for it.
    """

    starts: Tensor
    """int32 `[chunks + 1]`: tokens of chunk i are starts[i] .. starts[i + 1] - 1, from 0 on."""
    first_positions: Tensor
    """int32 `[chunks]`: position in its request of a chunk's first token; at 0 a request begins,
    and nothing of `read_rows` is read."""
    read_rows: Tensor
    """int32 or int64 `[chunks]`: the pool row whose base is first_positions, or the border before
    (`replaying_rule`)."""
    write_rows: Tensor
    """int32 or int64 `[chunks]`: the pool row that gets the state after the chunk; all different,
    and no other chunk's read row."""
    is_last: Tensor
    """bool or int32 `[chunks]`: whether the prompt ends here, so that the row decodes next."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the recurrence's arithmetic for activations of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def sizes_of(pools: RecurrentPools) -> tuple[int, int, int, int]:
    """Heads of a layer, rows and columns of a head's state, and groups of heads that share what
    meets the columns: B of Mamba-2, a key of Gated DeltaNet."""
    _rows, heads, size, columns = pools.state.shape
    return heads, size, columns, (pools.ring_xb.size(2) - heads * size) // columns


def check_layer(
    op: str,
    inputs: Tensor,
    params: tuple[Tensor, ...],
    pools: RecurrentPools,
    rule: FlushRule,
    width: int,
    groups: int,
    in_proj: int,
    ring_dim: int,
    conv_dim: int,
    gates: int,
    names: Sequence[str],
) -> None:
    """Refuse, with a ValueError, what does not fit a layer of these sizes: inputs, pools, and
    parameters, of which those called `names` are last and have a number a head."""
    rows, heads, size, columns = pools.state.shape
    if groups < 1 or heads % groups or inputs.size(1) != in_proj:
        raise ValueError(
            f"{op}: a state of {heads} heads x {size} x {columns} and a ring of "
            f"{pools.ring_xb.size(2)} channels are {groups} key heads or groups, and input rows of "
            f"{in_proj if groups > 0 else 'no size'}; found rows of {inputs.size(1)}: pass "
            "in_proj's output and this layer's pools."
        )
    ring, conv_ring = pools.ring_xb.size(1), pools.conv.size(1)
    fits = pools.ring_xb.size(0) == rows and pools.ring_xb.size(2) == ring_dim
    fits = fits and pools.ring_gates.shape == (rows, ring, gates, heads)
    if not fits or pools.conv.shape != (rows, conv_ring, conv_dim):
        raise ValueError(
            f"{op}: pools do not fit each other: state {tuple(pools.state.shape)}, ring_xb "
            f"{tuple(pools.ring_xb.shape)}, ring_gates {tuple(pools.ring_gates.shape)} with "
            f"{gates} gates, conv {tuple(pools.conv.shape)}; see RecurrentPools."
        )
    if ring < rule.ring_length(width) or conv_ring < rule.conv_length(width):
        raise ValueError(
            f"{op}: rings of {ring} and {conv_ring} entries are too short for {rule} and rows of "
            f"{width}: make them {rule.ring_length(width)} and {rule.conv_length(width)} or more."
        )
    dtypes, wide = {inputs.dtype, pools.ring_xb.dtype, pools.conv.dtype}, wide_dtype(inputs.dtype)
    states = (wide, torch.bfloat16)
    if len(dtypes) > 1 or pools.ring_gates.dtype != wide or pools.state.dtype not in states:
        raise ValueError(
            f"{op}: ring_xb and conv must have the input's dtype, ring_gates {wide}, the state"
            f" {wide} or bfloat16; found {sorted(map(str, dtypes))}, {pools.ring_gates.dtype}, "
            f"{pools.state.dtype}."
        )
    if rule.replays and (inputs.dtype.itemsize != 2 or pools.state.dtype != wide):
        raise ValueError(
            f"{op}: {rule} has inputs of 16 bits and states of {wide}; found {inputs.dtype} and "
            f"{pools.state.dtype}."
        )
    # A whole pool is asked first: `pool[0]` takes microseconds, in every layer of a step.
    are_whole = all(pool.is_contiguous() or pool[0].is_contiguous() for pool in pools)
    if inputs.stride(1) != 1 or not are_whole:
        raise ValueError(
            f"{op}: elements of an input row, and of a row of a pool, must be adjacent: pass whole "
            "rows."
        )
    first = len(params) - len(names)
    fits = params[0].numel() == conv_dim * CONV_WIDTH
    for number, tensor in enumerate(params):
        wanted = heads if number >= first else conv_dim
        fits = fits and tensor.is_contiguous() and (not number or tensor.shape == (wanted,))
    if not fits:
        bias = f" conv_bias ({conv_dim},)," if first > 1 else ""
        raise ValueError(
            f"{op}: parameters must be contiguous, conv_weight ({conv_dim}, {CONV_WIDTH}),{bias} "
            f"{', '.join(names[:-1])} and {names[-1]} ({heads},); found "
            f"{[tuple(tensor.shape) for tensor in params]}."
        )


def begin_decode[Shape](
    op: str,
    shape_of: Callable[..., Shape],
    inputs: Tensor,
    params: tuple[Tensor, ...],
    pools: RecurrentPools,
    step: DecodeRows,
    rule: FlushRule,
    out: Tensor | None,
) -> tuple[Shape, Tensor]:
    """The sizes of a layer and the output of its decode rows, after all checks."""
    row_index, positions, base, width = step
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"{op}: rows have 1 to {MAX_WIDTH} query tokens, not {width}.")
    rows = row_index.numel()
    if inputs.size(0) < rows * width or positions.numel() < rows * width:
        raise ValueError(
            f"{op}: {rows} rows of {width} query tokens want {rows * width} input rows and "
            f"positions; found {inputs.size(0)} and {positions.numel()}."
        )
    if base.numel() < rows:
        raise ValueError(
            f"{op}: {rows} rows want as many bases; found {base.numel()}: pass the second tensor "
            "that next_bases returned."
        )
    shape = shape_of(op, inputs, params, pools, rule, width)
    return shape, _output_for(op, out, inputs, rows * width, pools)


def begin_prefill[Shape](
    op: str,
    shape_of: Callable[..., Shape],
    inputs: Tensor,
    params: tuple[Tensor, ...],
    pools: RecurrentPools,
    rows: PrefillRows,
    base_after: Tensor,
    rule: FlushRule,
    out: Tensor | None,
) -> tuple[Shape, Tensor]:
    """The sizes of a layer and the output of a step's chunks, after all checks."""
    shape = shape_of(op, inputs, params, pools, rule, 1)
    chunks = rows.write_rows.numel()
    if rows.starts.numel() != chunks + 1 or base_after.numel() != chunks:
        raise ValueError(
            f"{op}: {chunks} chunks want {chunks + 1} starts and {chunks} bases; found "
            f"{rows.starts.numel()} and {base_after.numel()}: slice what next_bases returned."
        )
    return shape, _output_for(op, out, inputs, inputs.size(0), pools)


def _output_for(
    op: str, out: Tensor | None, inputs: Tensor, tokens: int, pools: RecurrentPools
) -> Tensor:
    channels = pools.state.size(1) * pools.state.size(2)
    if out is None:
        return torch.empty((tokens, channels), dtype=inputs.dtype, device=inputs.device)
    if out.shape != (tokens, channels) or out.stride(1) != 1 or out.dtype != inputs.dtype:
        raise ValueError(
            f"{op}: out must be ({tokens}, {channels}) of {inputs.dtype} with adjacent elements; "
            f"found {tuple(out.shape)} of {out.dtype}, strides {out.stride()}."
        )
    return out
