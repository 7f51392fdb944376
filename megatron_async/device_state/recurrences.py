"""The kinds of recurrent layers: what a slot of each holds, and the ops that read and write it.

`RecurrentState` knows a layer by its `Recurrence` alone; a new kind is a class here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.models.layer_sizes import DeltaSizes, MambaSizes
from megatron_async.ops.kernels import Kernels
from megatron_async.ops.recurrent.delta_pools import DeltaPools, check_dims
from megatron_async.ops.recurrent.mamba_pools import (
    LEAST_STATE,
    FlushRule,
    MambaPools,
    wide_dtype,
)

PoolSizes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Of a slot's part of each pool: its shape and dtype, by the pool's name."""


class Recurrence(Protocol):
    """One kind of recurrent layer with its sizes on this rank. Equal ones share their pools'
    memory, so they can be compared and hashed."""

    @property
    def name(self) -> str:
        """Of the kind, for messages."""

    @property
    def channels(self) -> int:
        """Elements of a token's output."""

    def check(self) -> None:
        """Refuse sizes that the ops do not serve.

        Raises:
            ConfigurationError: one of them; names it and what is served.
        """

    def pool_sizes(
        self, rule: FlushRule, width: int, dtype: torch.dtype, state_dtype: torch.dtype
    ) -> PoolSizes:
        """What a slot takes in each pool, in the order of `make_pools`.

        Args:
            rule: when states are written.
            width: most query tokens of a decode row.
            dtype: of activations.
            state_dtype: of the states.
        """

    def make_pools(self, tensors: Sequence[Tensor]) -> Any:
        """The pools of a layer as its ops take them, from tensors `[rows, *sizes]`."""

    def decode(self, ops: Kernels) -> Callable[..., Tensor]:
        """The op of decode rows; arguments are those of `mamba_decode`, but for its own pools and
        parameters."""

    def prefill(self, ops: Kernels) -> Callable[..., Tensor]:
        """The op of prefill chunks, likewise as `mamba_prefill`."""


@dataclass(frozen=True)
class MambaRecurrence:
    """Mamba-2 (Dao and Gu 2024)."""

    sizes: MambaSizes
    name = "Mamba-2"

    @property
    def channels(self) -> int:
        """See `Recurrence.channels`."""
        return self.sizes.inner

    def check(self) -> None:
        """See `Recurrence.check`."""
        size = self.sizes.state_dim
        if size < LEAST_STATE or size & (size - 1):
            raise ConfigurationError(
                f"mamba_state_dim={size} is not served: it must be a power of two from "
                f"{LEAST_STATE} on."
            )

    def pool_sizes(
        self, rule: FlushRule, width: int, dtype: torch.dtype, state_dtype: torch.dtype
    ) -> PoolSizes:
        """See `Recurrence.pool_sizes`."""
        sizes, ring = self.sizes, rule.ring_length(width)
        kept = sizes.inner + sizes.groups * sizes.state_dim
        return {
            "state": (sizes.state_shape, state_dtype),
            "ring_xb": ((ring, kept), dtype),
            "ring_dt": ((ring, sizes.heads), wide_dtype(dtype)),
            "conv": ((rule.conv_length(width), sizes.conv), dtype),
        }

    def make_pools(self, tensors: Sequence[Tensor]) -> MambaPools:
        """See `Recurrence.make_pools`."""
        return MambaPools(*tensors)

    def decode(self, ops: Kernels) -> Callable[..., Tensor]:
        """See `Recurrence.decode`."""
        return ops.mamba_decode

    def prefill(self, ops: Kernels) -> Callable[..., Tensor]:
        """See `Recurrence.prefill`."""
        return ops.mamba_prefill


@dataclass(frozen=True)
class DeltaRecurrence:
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024)."""

    sizes: DeltaSizes
    name = "Gated DeltaNet"

    @property
    def channels(self) -> int:
        """See `Recurrence.channels`."""
        return self.sizes.values

    def check(self) -> None:
        """See `Recurrence.check`."""
        try:
            check_dims("Gated DeltaNet layers", self.sizes.key_dim, self.sizes.value_dim)
        except ValueError as error:
            raise ConfigurationError(
                f"linear_key_head_dim={self.sizes.key_dim} with linear_value_head_dim="
                f"{self.sizes.value_dim} is not served: {error}"
            ) from error

    def pool_sizes(
        self, rule: FlushRule, width: int, dtype: torch.dtype, state_dtype: torch.dtype
    ) -> PoolSizes:
        """See `Recurrence.pool_sizes`."""
        sizes, ring = self.sizes, rule.ring_length(width)
        return {
            "state": (sizes.state_shape, state_dtype),
            "ring_xb": ((ring, sizes.values + sizes.keys), dtype),
            "ring_dt": ((ring, sizes.value_heads), wide_dtype(dtype)),
            "conv": ((rule.conv_length(width), sizes.conv), dtype),
        }

    def make_pools(self, tensors: Sequence[Tensor]) -> DeltaPools:
        """See `Recurrence.make_pools`."""
        return DeltaPools(*tensors)

    def decode(self, ops: Kernels) -> Callable[..., Tensor]:
        """See `Recurrence.decode`."""
        return ops.delta_decode

    def prefill(self, ops: Kernels) -> Callable[..., Tensor]:
        """See `Recurrence.prefill`."""
        return ops.delta_prefill


def recurrence_of(sizes: MambaSizes | DeltaSizes) -> Recurrence:
    """The recurrence of a layer of these sizes, which are one rank's."""
    return MambaRecurrence(sizes) if isinstance(sizes, MambaSizes) else DeltaRecurrence(sizes)
