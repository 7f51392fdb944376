"""The sizes and parameters of a Mamba-2 layer (Dao and Gu 2024); what it keeps of each sequence:
`recurrent_pools.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.ops.recurrent.recurrent_pools import (
    FlushRule,
    RecurrentPools,
    check_layer,
    sizes_of,
)

LEAST_STATE = 16
"""The least d_state, which must be a power of two."""
GATES = 2
"""Numbers of a token and head in the ring: the logarithm of its decay, and dt."""
LANES = 16
"""Elements of a head that a program of the second decode kernel processes: with more, fewer bytes
are in flight at a time."""


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


class Gating(NamedTuple):
    """Gate and norm after decode rows of one query token, as far as a row's own lanes go.

    The outputs are gated and multiplied by the norm's weight; the product after them divides by the
    root mean squares (`Stream.squares`), which are of all heads of a group.
    """

    weight: Tensor
    """`[d_inner]`, the norm's."""
    squares: Tensor
    """float32 `[decode rows, groups, parts]`, written: sums of the squares of gated outputs, one
    for `LANES` elements of a head."""


def make_gating(weight: Tensor, rows: int, groups: int, heads: int, head_dim: int) -> Gating:
    """A gating of so many decode rows, its squares not yet written."""
    parts = heads // groups * -(-head_dim // LANES)
    shape = (rows, groups, parts)
    return Gating(weight, torch.empty(shape, dtype=torch.float32, device=weight.device))


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

    @property
    def ring_dim(self) -> int:
        """Channels of `ring_xb`: x and B."""
        return self.d_inner + self.bc_dim

    @property
    def in_proj(self) -> int:
        """Columns of in_proj's output: z, x, B, C and dt."""
        return self.d_inner + self.conv_dim + self.heads

    @property
    def group_heads(self) -> int:
        """Heads of a group."""
        return self.heads // self.groups


def check_gating(op: str, gating: Gating, shape: MambaShape, rows: int, width: int) -> None:
    """Refuse, with a ValueError, a gating of other sizes, and rows of several query tokens."""
    if width != 1:
        raise ValueError(f"{op}: rows of {width} query tokens are not gated here; of 1 they are.")
    parts = shape.heads // shape.groups * -(-shape.head_dim // LANES)
    wanted = ((shape.d_inner,), (rows, shape.groups, parts))
    found = tuple(gating.weight.shape), tuple(gating.squares.shape)
    if found != wanted or not all(tensor.is_contiguous() for tensor in gating):
        raise ValueError(
            f"{op}: a gating's weight and squares must be {wanted[0]} and {wanted[1]}, contiguous; "
            f"found {found[0]} and {found[1]}."
        )


def shape_of(
    op: str, zxbcdt: Tensor, params: MambaParams, pools: RecurrentPools, rule: FlushRule, width: int
) -> MambaShape:
    """The sizes of a layer, found in its tensors; `width`: query tokens of a decode row, 1 for a
    prefill.

    Raises:
        ValueError: sizes, dtypes or layouts do not fit each other.
    """
    rule.check()
    heads, head_dim, d_state, groups = sizes_of(pools)
    shape = MambaShape(heads, head_dim, groups, d_state)
    if d_state < LEAST_STATE or d_state & (d_state - 1):
        raise ValueError(f"{op}: d_state {d_state} must be a power of two from {LEAST_STATE} on.")
    sizes = (groups, shape.in_proj, shape.ring_dim, shape.conv_dim, GATES)
    check_layer(op, zxbcdt, params, pools, rule, width, *sizes, MambaParams._fields[2:])
    return shape
