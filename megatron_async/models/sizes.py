"""Largest sizes of a model that are read from a file, and the sizes of recurrent layers' parts.

Patterns, lists of tensors and shapes are made from a file's numbers before a weight is read, so a
number that no model has would take all memory or hours. Each limit is at least ten times what
published models have. No torch here, as in `models/architecture.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self, override

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
    """What is wrong with a size: what it must be, or "" where nothing is. Its name is that in
    `config.json`, GGUF metadata (with the architecture's prefix), Megatron's arguments or
    `ModelArchitecture`."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return "must be a positive integer"
    limit = _LARGEST.get(name.rpartition(".")[2], LARGEST_OTHER)
    return "" if value <= limit else f"is more than any model has (at most {limit})"


CONV_KERNEL = 4
"""Inputs of one output of a recurrent layer's convolution, in all families."""


class RecurrentSizes(ABC):
    """Sizes of a kind of recurrent layers, whole or on one tensor-parallel rank."""

    FIELDS: ClassVar[tuple[str, ...]]
    """Names of the sizes in `ModelArchitecture` and in Megatron's `TransformerConfig`."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """On all ranks together, of an architecture or a `TransformerConfig` with such layers."""
        return cls(*(getattr(model, name) for name in cls.FIELDS))

    @property
    @abstractmethod
    def strips(self) -> dict[str, int]:
        """Rows of `in_proj`, in order, by Megatron-Core's names."""

    @property
    @abstractmethod
    def conv_strips(self) -> dict[str, int]:
        """Channels of the convolution, in order."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one request's state, float32; the first two are those of the output."""

    @property
    @abstractmethod
    def own_parameters(self) -> int:
        """Weights beside the two products."""

    @property
    @abstractmethod
    def shared(self) -> dict[str, int]:
        """What tensor-parallel ranks must divide, for messages."""

    @abstractmethod
    def of_rank(self, ranks: int) -> Self:
        """Sizes of one of `ranks` tensor-parallel ranks."""

    @cached_property
    def channels(self) -> int:
        """Elements of the output, and of z, its gate: all heads'."""
        heads, size, _columns = self.state_shape
        return heads * size

    @property
    def in_proj(self) -> int:
        """Rows of `in_proj`."""
        return sum(self.strips.values())

    @property
    def conv(self) -> int:
        """Channels of the convolution."""
        return sum(self.conv_strips.values())


@dataclass(frozen=True)
class MambaSizes(RecurrentSizes):
    """Mamba-2 (Dao and Gu 2024)."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    """Groups of heads, with a B and a C each."""

    FIELDS = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")

    def __str__(self) -> str:
        heads = f"{self.heads} heads of {self.head_dim}, state {self.state_dim}"
        return f"{heads}, {self.groups} groups"

    @property
    @override
    def strips(self) -> dict[str, int]:
        shared = self.groups * self.state_dim
        return {"z": self.channels, "x": self.channels, "B": shared, "C": shared, "dt": self.heads}

    @property
    @override
    def conv_strips(self) -> dict[str, int]:
        return {name: self.strips[name] for name in ("x", "B", "C")}

    @property
    @override
    def state_shape(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.state_dim

    @property
    @override
    def own_parameters(self) -> int:
        # The convolution with its biases; A_log, D, dt_bias; the norm.
        return self.conv * (CONV_KERNEL + 1) + 3 * self.heads + self.channels

    @property
    @override
    def shared(self) -> dict[str, int]:
        found = {"Mamba-2 heads (mamba_num_heads)": self.heads}
        if self.groups > 1:  # B and C of a single group are on every rank
            found["groups of Mamba-2 heads (mamba_num_groups)"] = self.groups
        return found

    @override
    def of_rank(self, ranks: int) -> MambaSizes:
        groups = self.groups if self.groups == 1 else self.groups // ranks
        return MambaSizes(self.heads // ranks, self.head_dim, self.state_dim, groups)


@dataclass(frozen=True)
class DeltaSizes(RecurrentSizes):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024)."""

    key_heads: int
    """Heads of queries, and of keys."""
    key_dim: int
    """Elements of a query head, and of a key head."""
    value_heads: int
    """Neighbouring heads share a key head."""
    value_dim: int

    FIELDS = (
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_num_value_heads",
        "linear_value_head_dim",
    )

    def __str__(self) -> str:
        keys = f"{self.key_heads} key heads of {self.key_dim}"
        return f"{keys}, {self.value_heads} value heads of {self.value_dim}"

    @property
    @override
    def strips(self) -> dict[str, int]:
        # z is the gate, beta how much is written, alpha the decay.
        beta = self.value_heads
        return self.conv_strips | {"z": self.channels, "beta": beta, "alpha": beta}

    @property
    @override
    def conv_strips(self) -> dict[str, int]:
        keys = self.key_heads * self.key_dim
        return {"query": keys, "key": keys, "value": self.channels}

    @property
    @override
    def state_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.value_dim, self.key_dim

    @property
    @override
    def own_parameters(self) -> int:
        # The convolution; A_log, dt_bias; the norm.
        return self.conv * CONV_KERNEL + 2 * self.value_heads + self.value_dim

    @property
    @override
    def shared(self) -> dict[str, int]:
        return {"Gated DeltaNet key heads (linear_num_key_heads)": self.key_heads}

    @override
    def of_rank(self, ranks: int) -> DeltaSizes:
        keys, values = self.key_heads // ranks, self.value_heads // ranks
        return DeltaSizes(keys, self.key_dim, values, self.value_dim)


SIZES_OF: dict[str, type[RecurrentSizes]] = {"M": MambaSizes, "G": DeltaSizes}
"""Sizes of the recurrent kinds of layers, by the character of Megatron's layer pattern."""
