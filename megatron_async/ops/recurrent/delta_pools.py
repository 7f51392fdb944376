"""The sizes and parameters of a Gated DeltaNet layer (Yang, Kautz and Hatamizadeh 2024,
arXiv:2412.06464).

Per value head with its key head's q and k, both of length 1 (q further divided by sqrt(key_dim)),
and with state S `[value_dim, key_dim]`:

    S = exp(g) S;  u = beta (v - S k);  S = S + u k^T;  o = S q

u is the token's *pseudo value*. Once the token was processed, u is a fixed vector, and the
recurrence is a plain linear attention over pairs (u, k):

    S_t = exp(G_t - G_base) S_base + sum of exp(G_t - G_j) u_j k_j^T over base <= j <= t

with G the running sum of g. So the rings keep (u, k, g) as Mamba-2's keep (x, B, dt), and
`FlushRule` serves both: a token is not replayed, and one that is taken back leaves nothing behind,
because u depends on the tokens before it only. u is rounded to the activations' dtype before its
own step uses it, so that later steps read the same number.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron_async.ops.recurrent.recurrent_pools import (
    DELTA_TILE,
    FlushRule,
    RecurrentPools,
    check_layer,
    sizes_of,
)

KEY_DIMS = (16, 32, 64, 128, 256)
"""Sizes of a key that the kernels serve."""
VALUE_STEP = 16
"""A value's size is a multiple of this."""
NORM_EPS = 1e-6
"""Added to a key's, and a query's, sum of squares: the number of flash-linear-attention's l2norm,
of transformers and of Megatron-Core."""
GATES = 1
"""Numbers of a token and value head in the ring: g."""
ALIGNED = 8
"""Elements of 16 bytes: what a load takes, and with it the order of a norm's sum, follows how rows
are aligned."""
ALIGNED_HEADS = 4
"""Value heads, whose beta and alpha end an input row, are a multiple of this with such a rule."""
REPLAYED_GATES = 2
"""With a rule that replays: beta, then g; and the ring has keys and values, no pseudo values."""


class DeltaParams(NamedTuple):
    """A layer's parameters, as Megatron-Core's GatedDeltaNet names and orders them."""

    conv_weight: Tensor
    """`[conv_dim, 4]` or `[conv_dim, 1, 4]`, params dtype: of q, k and v. There is no bias."""
    dt_bias: Tensor
    """`[value heads]`, params dtype or float32."""
    a_log: Tensor
    """`[value heads]`, float32: g is -exp(a_log) softplus(alpha + dt_bias)."""


class DeltaShape(NamedTuple):
    """The sizes of a layer. Value heads h n / nk to (h + 1) n / nk - 1 share key head h, where
    there are n value heads and nk key heads."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def key_inner(self) -> int:
        """Channels of k, and of q."""
        return self.key_heads * self.key_dim

    @property
    def value_inner(self) -> int:
        """Channels of v, of z and of the output."""
        return self.value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_inner + self.value_inner

    @property
    def ring_dim(self) -> int:
        """Channels of `ring_xb`: pseudo values and keys."""
        return self.value_inner + self.key_inner

    @property
    def in_proj(self) -> int:
        """Columns of in_proj's output: q, k, v, z, beta and alpha."""
        return self.conv_dim + self.value_inner + 2 * self.value_heads

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads


def shape_of(
    op: str, qkvzba: Tensor, params: DeltaParams, pools: RecurrentPools, rule: FlushRule, width: int
) -> DeltaShape:
    """The sizes of a layer, found in its tensors; `width`: query tokens of a decode row, 1 for a
    prefill.

    Raises:
        ValueError: sizes, dtypes or layouts do not fit each other, or a key's or a value's size is
            not served.
    """
    rule.check()
    value_heads, value_dim, key_dim, key_heads = sizes_of(pools)
    shape = DeltaShape(key_heads, key_dim, value_heads, value_dim)
    check_dims(op, key_dim, value_dim)
    gates = REPLAYED_GATES if rule.replays else GATES
    if rule.replays and (not rule.is_delta or qkvzba.stride(0) % ALIGNED):
        raise ValueError(
            f"{op}: {rule} must have tiles of {DELTA_TILE}, and strides of input rows be multiples "
            f"of {ALIGNED}; found {qkvzba.stride(0)}."
        )
    sizes = (key_heads, shape.in_proj, shape.ring_dim, shape.conv_dim, gates)
    check_layer(op, qkvzba, params, pools, rule, width, *sizes, DeltaParams._fields[1:])
    return shape


def check_dims(op: str, key_dim: int, value_dim: int) -> None:
    """Refuse, with a ValueError, heads that the kernels do not serve."""
    if key_dim not in KEY_DIMS:
        raise ValueError(f"{op}: key_dim {key_dim} must be one of {KEY_DIMS}.")
    if value_dim < VALUE_STEP or value_dim % VALUE_STEP:
        raise ValueError(f"{op}: value_dim {value_dim} must be a multiple of {VALUE_STEP}.")
