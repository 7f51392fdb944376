"""What the Mamba-2 ops share: a layer's parameters, its pools by row, and the flush rule.

A row is what one sequence keeps in a recurrent layer. The state is written every few tokens only:
`state` holds the recurrence behind the first `base` tokens, and rings hold the inputs of the
tokens since (ReplaySSM, Dao AI Lab and NVIDIA 2026). A token at position t lies at t modulo the
ring's length. So tokens are taken back by starting the next step at an earlier position: nothing
is copied and nothing is zeroed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CONV_WIDTH = 4
"""Inputs that a token's convolution sees: its own and the three before."""
GRID = 128
"""Scans of a prompt are cut at multiples of this position, whatever the batch."""
MAX_WIDTH = 8
"""Query tokens that a decode row may have."""
LEAST_STATE = 16
"""The least d_state, which must be a power of two."""


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

    def ring_length(self, width: int) -> int:
        """The fewest entries of `ring_xb` and `ring_dt` where rows have up to `width` query tokens.

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
        """Refuse what the scan's grid cannot serve.

        Raises:
            ValueError: the period does not divide 128, or the lag is negative.
        """
        if self.period < 1 or GRID % self.period or self.lag < 0:
            raise ValueError(
                f"FlushRule: period {self.period} must be a power of two that divides {GRID} and "
                f"lag {self.lag} 0 or more: 16 and 0 suit most models."
            )


class MambaParams(NamedTuple):
    """A layer's parameters, as Megatron-Core's MambaMixer names and orders them."""

    conv_weight: Tensor
    """`[conv_dim, 4]` or `[conv_dim, 1, 4]`, params dtype; d_inner + 2 groups d_state channels."""
    conv_bias: Tensor
    """`[conv_dim]`, params dtype."""
    dt_bias: Tensor
    """`[heads]`, params dtype or float32."""
    a_log: Tensor
    """`[heads]`, float32: the decay rate is exp(a_log)."""
    d: Tensor
    """`[heads]`, float32: the share of its input that a token adds to its output."""


class MambaPools(NamedTuple):
    """One layer's memory. Rows may be strided, what lies in a row not; the last is the dummy row,
    which nothing reads or writes."""

    state: Tensor
    """`[rows, heads, head_dim, d_state]`, float32 or bfloat16: behind the first base tokens."""
    ring_xb: Tensor
    """`[rows, ring, d_inner + groups d_state]`, params dtype: x and B behind the convolution."""
    ring_dt: Tensor
    """`[rows, ring, heads]`, float32: dt behind bias and softplus."""
    conv: Tensor
    """`[rows, conv ring, conv_dim]`, params dtype: inputs of the convolution, x, B and C."""


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
    """int32 or int64 `[chunks]`: the pool row whose base is first_positions."""
    write_rows: Tensor
    """int32 or int64 `[chunks]`: the pool row that gets what is behind the chunk; all different,
    and no other chunk's read row."""
    is_last: Tensor
    """bool or int32 `[chunks]`: whether the prompt ends here, so that the row decodes next."""


class MambaShape(NamedTuple):
    """The sizes of a layer."""

    heads: int
    head_dim: int
    groups: int
    d_state: int

    @property
    def d_inner(self) -> int:
        """Channels of x, of z and of the output."""
        return self.heads * self.head_dim

    @property
    def bc_dim(self) -> int:
        """Channels of B, and of C."""
        return self.groups * self.d_state

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.d_inner + 2 * self.bc_dim


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the recurrence's arithmetic for activations of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def shape_of(
    op: str, zxbcdt: Tensor, params: MambaParams, pools: MambaPools, rule: FlushRule, width: int
) -> MambaShape:
    """The sizes of a layer, found in its tensors.

    Args:
        op: name of who asks, for messages.
        zxbcdt: `[tokens, 2 d_inner + 2 groups d_state + heads]`.
        params: parameters of the layer.
        pools: pools of the layer.
        rule: the flush rule.
        width: query tokens of a decode row, 1 for a prefill.

    Raises:
        ValueError: sizes, dtypes or layouts do not fit each other.
    """
    rule.check()
    _rows, heads, head_dim, d_state = pools.state.shape
    d_inner = heads * head_dim
    groups = (pools.ring_xb.size(2) - d_inner) // d_state
    shape = MambaShape(heads, head_dim, groups, d_state)
    wanted = 2 * d_inner + 2 * groups * d_state + heads
    if groups < 1 or heads % groups or zxbcdt.size(1) != wanted:
        raise ValueError(
            f"{op}: a state of {heads} heads x {head_dim} x {d_state} and a ring of "
            f"{pools.ring_xb.size(2)} channels are {groups} groups, and input rows of {wanted}; "
            f"found rows of {zxbcdt.size(1)}: pass in_proj's output and this layer's pools."
        )
    if d_state < LEAST_STATE or d_state & (d_state - 1):
        raise ValueError(f"{op}: d_state {d_state} must be a power of two from {LEAST_STATE} on.")
    _check_pools(op, zxbcdt, pools, shape, rule, width)
    _check_params(op, params, shape)
    return shape


def _check_pools(
    op: str, zxbcdt: Tensor, pools: MambaPools, shape: MambaShape, rule: FlushRule, width: int
) -> None:
    rows, heads = pools.state.shape[:2]
    ring, conv_ring = pools.ring_xb.size(1), pools.conv.size(1)
    fits = pools.ring_xb.size(0) == rows and pools.ring_xb.size(2) == shape.d_inner + shape.bc_dim
    fits = fits and pools.ring_dt.shape == (rows, ring, heads)
    if not fits or pools.conv.shape != (rows, conv_ring, shape.conv_dim):
        raise ValueError(
            f"{op}: pools do not fit each other: state {tuple(pools.state.shape)}, ring_xb "
            f"{tuple(pools.ring_xb.shape)}, ring_dt {tuple(pools.ring_dt.shape)}, conv "
            f"{tuple(pools.conv.shape)}; see MambaPools."
        )
    if ring < rule.ring_length(width) or conv_ring < rule.conv_length(width):
        raise ValueError(
            f"{op}: rings of {ring} and {conv_ring} entries are too short for {rule} and rows of "
            f"{width}: make them {rule.ring_length(width)} and {rule.conv_length(width)} or more."
        )
    dtypes, wide = {zxbcdt.dtype, pools.ring_xb.dtype, pools.conv.dtype}, wide_dtype(zxbcdt.dtype)
    states = (wide, torch.bfloat16)
    if len(dtypes) > 1 or pools.ring_dt.dtype != wide or pools.state.dtype not in states:
        raise ValueError(
            f"{op}: ring_xb and conv must have the input's dtype, ring_dt {wide}, the state "
            f"{wide} or bfloat16; found {sorted(map(str, dtypes))}, {pools.ring_dt.dtype}, "
            f"{pools.state.dtype}."
        )
    if zxbcdt.stride(1) != 1 or not all(pool[0].is_contiguous() for pool in pools):
        raise ValueError(
            f"{op}: elements of an input row, and of a row of a pool, must be adjacent: pass whole "
            "rows."
        )


def _check_params(op: str, params: MambaParams, shape: MambaShape) -> None:
    heads, conv_dim = shape.heads, shape.conv_dim
    fits = params.conv_weight.numel() == conv_dim * CONV_WIDTH
    fits = fits and params.conv_bias.shape == (conv_dim,)
    per_head = (params.dt_bias, params.a_log, params.d)
    fits = fits and all(tensor.shape == (heads,) for tensor in per_head)
    if not fits or not all(tensor.is_contiguous() for tensor in params):
        raise ValueError(
            f"{op}: parameters must be contiguous, conv_weight ({conv_dim}, {CONV_WIDTH}), "
            f"conv_bias ({conv_dim},), dt_bias, a_log and d ({heads},); found "
            f"{[tuple(tensor.shape) for tensor in params]}."
        )
