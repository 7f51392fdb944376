"""Sizes that follow from an architecture: weights of a layer by its kind, and the parts of
recurrent layers.

No torch here, as in `models/architecture.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_async.models.architecture import ModelArchitecture

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


def kind_parameters(a: ModelArchitecture, kind: str, experts: int) -> int:
    """Number of weights of a layer, its norm included.

    Args:
        a: of the model.
        kind: character of the layer pattern.
        experts: that are counted of a mixture.
    """
    return a.hidden_size + _PARAMETERS[kind](a, experts)


def _attention(a: ModelArchitecture, _experts: int) -> int:
    q, kv = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    gate = q * a.attention_output_gate
    biases = (q + gate + 2 * kv) * a.add_qkv_bias
    return a.hidden_size * (2 * q + gate + 2 * kv) + biases + 2 * a.kv_channels * a.qk_layernorm


def _mlp(a: ModelArchitecture, _experts: int) -> int:
    return _matrices(a) * a.hidden_size * a.ffn_hidden_size


def _experts(a: ModelArchitecture, experts: int) -> int:
    router = a.num_moe_experts * (a.hidden_size + a.moe_router_enable_expert_bias)
    gate = a.hidden_size * a.moe_shared_expert_gate
    units = experts * a.moe_ffn_hidden_size + a.moe_shared_expert_intermediate_size
    return router + gate + _matrices(a) * a.hidden_size * units


def _mamba(a: ModelArchitecture, _experts: int) -> int:
    sizes = a.mamba
    conv = sizes.conv * (CONV_KERNEL + 1)
    of_heads = 3 * sizes.heads  # A_log, D, dt_bias
    return a.hidden_size * (sizes.in_proj + sizes.inner) + conv + of_heads + sizes.inner


def _delta(a: ModelArchitecture, _experts: int) -> int:
    sizes = a.delta
    of_heads = 2 * sizes.value_heads + sizes.value_dim  # A_log, dt_bias; out_norm
    return a.hidden_size * (sizes.in_proj + sizes.values) + sizes.conv * CONV_KERNEL + of_heads


def _matrices(a: ModelArchitecture) -> int:
    """Matrices of an MLP: gate, up and down, or up and down."""
    return 3 if a.activation == "silu" else 2


_PARAMETERS: dict[str, Callable[[ModelArchitecture, int], int]] = {
    "*": _attention,
    "-": _mlp,
    "E": _experts,
    "M": _mamba,
    "G": _delta,
}
