"""The kinds of recurrent layers: what a slot of each holds, and the ops that read and write it.

`RecurrentState` uses only a layer's `Recurrence`: one of the classes here. Equal ones share memory.
A new kind of layer needs one more class with the same members.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.models.sizes import DeltaSizes, MambaSizes, RecurrentSizes
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.recurrent import delta_pools, mamba_pools
from megatron_async.ops.recurrent.recurrent_pools import DELTA_TILE, TILE


class PoolWidths(NamedTuple):
    """Elements that a layer's pools (`RecurrentPools`) hold for a slot, or for a token of it."""

    state: tuple[int, int, int]
    """Shape of a slot's state."""
    ring_xb: int
    """Channels of a token."""
    ring_gates: tuple[int, int]
    """Gates and heads of a token."""
    conv: int
    """Channels of a token."""


@dataclass(frozen=True)
class Recurrence[Sizes: RecurrentSizes]:
    """A kind of layer, of some sizes. The ops of all kinds take the same arguments, but for inputs
    and parameters.

    Attributes:
        sizes: on this rank.
        name: of the kind, for messages.
        gates: numbers of a token and head in the ring, and with a rule that replays.
        tile: tokens of a tile of such a rule.
    """

    sizes: Sizes
    name: ClassVar[str]
    gates: ClassVar[tuple[int, int]]
    tile: ClassVar[int]

    def pool_widths(self, replays: bool) -> PoolWidths:
        """What the layer's pools hold, with a rule that replays or another."""
        state, conv = self.sizes.state_shape, self.sizes.conv
        # The convolution has two vectors that heads share (B and C, or q and k); the ring has one.
        kept = (self.sizes.channels + conv) // 2
        return PoolWidths(state, kept, (self.gates[replays], state[0]), conv)

    def check(self, replays: bool) -> None:
        """Refuse state sizes that the ops do not serve, with a rule that replays or another.

        Raises:
            ConfigurationError: one of them; names it and what is served.
        """
        raise NotImplementedError

    def decode(self, ops: Ops) -> Callable[..., Tensor]:
        """The op of decode rows."""
        raise NotImplementedError

    def prefill(self, ops: Ops) -> Callable[..., Tensor]:
        """The op of prefill chunks."""
        raise NotImplementedError


class MambaRecurrence(Recurrence[MambaSizes]):
    """Mamba-2 (Dao and Gu 2024). Its rings hold x and B, decays and step sizes."""

    name = "Mamba-2"
    gates = mamba_pools.GATES, mamba_pools.GATES
    tile = TILE

    def check(self, replays: bool) -> None:
        size = self.sizes.state_dim
        if size < mamba_pools.LEAST_STATE or size & (size - 1):
            raise ConfigurationError(
                f"mamba_state_dim={size} is not served: it must be a power of two from "
                f"{mamba_pools.LEAST_STATE} on."
            )

    def decode(self, ops: Ops) -> Callable[..., Tensor]:
        return ops.mamba_decode

    def prefill(self, ops: Ops) -> Callable[..., Tensor]:
        return ops.mamba_prefill


class DeltaRecurrence(Recurrence[DeltaSizes]):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024). Its rings hold pseudo values and keys, and
    the logarithms of decays."""

    name = "Gated DeltaNet"
    gates = delta_pools.GATES, delta_pools.REPLAYED_GATES
    tile = DELTA_TILE

    def check(self, replays: bool) -> None:
        keys, values = self.sizes.key_dim, self.sizes.value_dim
        try:
            delta_pools.check_dims(self.name, keys, values)
        except ValueError as error:
            raise ConfigurationError(
                f"linear_key_head_dim={keys} with linear_value_head_dim={values} is not served: "
                f"{error}"
            ) from error
        if replays and (heads := self.sizes.value_heads) % delta_pools.ALIGNED_HEADS:
            raise ConfigurationError(
                f"batch_invariant_mode=True is not served with {heads} value heads of "
                f"{self.name} on a rank: their number must be a multiple of "
                f"{delta_pools.ALIGNED_HEADS}."
            )

    def decode(self, ops: Ops) -> Callable[..., Tensor]:
        return ops.delta_decode

    def prefill(self, ops: Ops) -> Callable[..., Tensor]:
        return ops.delta_prefill


RECURRENCES: dict[type[RecurrentSizes], type[Recurrence[Any]]] = {
    MambaSizes: MambaRecurrence,
    DeltaSizes: DeltaRecurrence,
}
"""By the class of a layer's sizes, which are one rank's."""
