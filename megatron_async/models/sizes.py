"""Largest sizes of a model that are read from a file, and the sizes of recurrent layers' parts.

Patterns, lists of tensors and shapes are made from a file's numbers before a weight is read, so a
number that no model has would take all memory or hours. Each limit is at least ten times what
published models have. No torch here, as in `models/architecture.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LARGEST_LAYERS = 4096
LARGEST_EXPERTS = 1 << 14
LARGEST_EXPERT_WEIGHTS = 1 << 20
"""Experts of all layers together: each has a name or more."""
LARGEST_DEPTHS = 64
LARGEST_HIDDEN = 1 << 20
LARGEST_HEADS = 1 << 16
LARGEST_VOCABULARY = 1 << 24
LARGEST_OTHER = 2**31 - 1
"""Limit of every other size: what fits 32 bits."""

_EACH: Mapping[int, tuple[str, ...]] = {
    LARGEST_LAYERS: ("num_layers", "num_hidden_layers", "block_count"),
    LARGEST_EXPERTS: (
        "num_experts",
        "num_local_experts",
        "num_moe_experts",
        "n_routed_experts",
        "expert_count",
    ),
    LARGEST_DEPTHS: (
        "mtp_num_depths",
        "mtp_num_layers",
        "mtp_num_hidden_layers",
        "num_nextn_predict_layers",
    ),
    LARGEST_HIDDEN: ("hidden_size", "embedding_length"),
    LARGEST_HEADS: (
        "num_attention_heads",
        "num_key_value_heads",
        "num_query_groups",
        "num_heads",
        "head_count",
        "head_count_kv",
        "head_dim",
        "key_length",
        "kv_channels",
        "mamba_num_heads",
        "mamba_n_heads",
        "mamba_num_groups",
        "n_groups",
        "linear_num_key_heads",
        "linear_num_value_heads",
    ),
    LARGEST_VOCABULARY: ("vocab_size",),
}
_LARGEST = {name: limit for limit, names in _EACH.items() for name in names}


def size_problem(name: str, value: object) -> str:
    """What is wrong with a size: what it must be, or "" where nothing is.

    Args:
        name: of the setting, in `config.json`, GGUF metadata (with the architecture's prefix),
            Megatron's arguments or `ModelArchitecture`.
        value: as it was read.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return "must be a positive integer"
    limit = _LARGEST.get(name.rpartition(".")[2], LARGEST_OTHER)
    return "" if value <= limit else f"is more than any model has (at most {limit})"


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
