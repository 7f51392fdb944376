"""Sizes of the parts of recurrent layers.

No torch here, as in `models/architecture.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

CONV_KERNEL = 4
"""Inputs of one output of a recurrent layer's convolution, in all families."""


@dataclass(frozen=True)
class MambaSizes:
    """Sizes of a Mamba-2 layer (Dao and Gu 2024), whole or on one tensor-parallel rank."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    """Groups of heads, with a B and a C each."""

    @property
    def inner(self) -> int:
        """Elements of x, of z and of the output: all heads'."""
        return self.heads * self.head_dim

    @property
    def strips(self) -> dict[str, int]:
        """Rows of `in_proj`, in order: z (the gate), x, B, C and dt, Megatron-Core's names."""
        shared = self.groups * self.state_dim
        return {"z": self.inner, "x": self.inner, "B": shared, "C": shared, "dt": self.heads}

    @property
    def conv_strips(self) -> dict[str, int]:
        """Channels of the convolution, in order."""
        return {name: self.strips[name] for name in ("x", "B", "C")}

    @property
    def in_proj(self) -> int:
        """Rows of `in_proj`."""
        return sum(self.strips.values())

    @property
    def conv(self) -> int:
        """Channels of the convolution."""
        return sum(self.conv_strips.values())

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one request's state: `(heads, head_dim, state_dim)`, float32."""
        return self.heads, self.head_dim, self.state_dim

    def of_rank(self, ranks: int) -> MambaSizes:
        """Sizes of one of `ranks` tensor-parallel ranks: a share of the heads with their groups; or
        of a single group's heads, and then every rank has the group's B and C."""
        groups = self.groups if self.groups == 1 else self.groups // ranks
        return MambaSizes(self.heads // ranks, self.head_dim, self.state_dim, groups)


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a Gated DeltaNet layer (Yang, Kautz and Hatamizadeh 2024), whole or on one
    tensor-parallel rank."""

    key_heads: int
    """Heads of queries, and of keys."""
    key_dim: int
    """Elements of a query head, and of a key head."""
    value_heads: int
    """Heads of values; neighbouring heads share a key head."""
    value_dim: int
    """Elements of a value head."""

    @property
    def keys(self) -> int:
        """Elements of all keys of a token, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of v, of z and of the output: all heads'."""
        return self.value_heads * self.value_dim

    @property
    def strips(self) -> dict[str, int]:
        """Rows of `in_proj`, in order, by Megatron-Core's names: query, key, value, z (the gate),
        beta (how much is written) and alpha (the decay)."""
        beta = self.value_heads
        return self.conv_strips | {"z": self.values, "beta": beta, "alpha": beta}

    @property
    def conv_strips(self) -> dict[str, int]:
        """Channels of the convolution, in order."""
        return {"query": self.keys, "key": self.keys, "value": self.values}

    @property
    def in_proj(self) -> int:
        """Rows of `in_proj`."""
        return sum(self.strips.values())

    @property
    def conv(self) -> int:
        """Channels of the convolution."""
        return sum(self.conv_strips.values())

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one request's state: `(value heads, value_dim, key_dim)`, float32."""
        return self.value_heads, self.value_dim, self.key_dim

    def of_rank(self, ranks: int) -> DeltaSizes:
        """Sizes of one of `ranks` tensor-parallel ranks: a share of the key heads, with the value
        heads that share them."""
        return DeltaSizes(
            self.key_heads // ranks, self.key_dim, self.value_heads // ranks, self.value_dim
        )
