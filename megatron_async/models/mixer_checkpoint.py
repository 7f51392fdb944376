"""Mixers of recurrent layers in Megatron's distributed checkpoints.

`in_proj` and the convolution consist of strips. Tensor-parallel ranks split each strip separately,
so each is a tensor of its own in the checkpoint, as Megatron-Core 0.19's `MambaMixer` and
`GatedDeltaNet` write them: `in_proj.weight.z`, `.x`, `.B`, `.C`, `.dt` and `conv1d.weight.x` of
Mamba-2, `in_proj.weight.query`, `.key`, `.value`, `.z`, `.beta`, `.alpha` and
`conv1d.weight.query` of Gated DeltaNet, and so on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

if TYPE_CHECKING:
    from megatron_async.models.gated_delta import GatedDeltaMixer
    from megatron_async.models.mamba import Mamba2Mixer


def mamba_sharded_state_dict(
    mixer: Mamba2Mixer, prefix: str, offsets: tuple, metadata: dict | None
) -> dict[str, Any]:
    """The sharded tensors of a Mamba-2 mixer, by parameter name.

    Args:
        mixer: on one of the ranks.
        prefix: of the mixer's names, with a dot at its end.
        offsets: of axes that stand before the parameters' own, Megatron's `sharded_offsets`.
        metadata: Megatron's, or None.
    """
    maker = _Maker(mixer.tp_group, prefix, offsets, metadata)
    sizes = mixer.sizes
    on_all = ("B", "C") if mixer.whole_sizes.groups == 1 else ()
    return (
        maker.linear(in_proj=mixer.in_proj, out_proj=mixer.out_proj)
        | maker.plain("", {name: getattr(mixer, name) for name in ("dt_bias", "A_log", "D")})
        | maker.plain("norm.", {"weight": mixer.norm.weight})
        | maker.striped("in_proj.weight", mixer.in_proj.weight, sizes.strips, on_all=on_all)
        | maker.striped(
            "conv1d_weight", mixer.conv1d_weight, sizes.conv_strips, "conv1d.weight", on_all
        )
        | maker.striped("conv1d_bias", mixer.conv1d_bias, sizes.conv_strips, "conv1d.bias", on_all)
    )


def delta_sharded_state_dict(
    mixer: GatedDeltaMixer, prefix: str, offsets: tuple, metadata: dict | None
) -> dict[str, Any]:
    """The sharded tensors of a Gated DeltaNet mixer, by parameter name; arguments as of
    `mamba_sharded_state_dict`."""
    maker = _Maker(mixer.tp_group, prefix, offsets, metadata)
    sizes = mixer.sizes
    return (
        maker.linear(in_proj=mixer.in_proj, out_proj=mixer.out_proj)
        | maker.plain("", {name: getattr(mixer, name) for name in ("dt_bias", "A_log")})
        | maker.plain("out_norm.", {"weight": mixer.out_norm.weight}, axis=None)
        | maker.striped("in_proj.weight", mixer.in_proj.weight, sizes.strips)
        | maker.striped("conv1d.weight", mixer.conv1d.weight, sizes.conv_strips)
    )


class _Maker:
    """Makes the sharded tensors of one mixer."""

    def __init__(
        self, tp_group: dist.ProcessGroup, prefix: str, offsets: tuple, metadata: dict | None
    ) -> None:
        self._tp_group, self._prefix, self._offsets = tp_group, prefix, offsets
        self._metadata = ensure_metadata_has_dp_cp_group(metadata)
        self._replicas = self._metadata["dp_cp_group"]

    def linear(self, **layers: Any) -> dict[str, Any]:
        """Sharded tensors of linear layers, which make them themselves."""
        found: dict[str, Any] = {}
        for name, layer in layers.items():
            prefix = f"{self._prefix}{name}."
            found |= layer.sharded_state_dict(prefix, self._offsets, self._metadata)
        return found

    def plain(
        self, name: str, parameters: dict[str, Tensor], axis: int | None = 0
    ) -> dict[str, Any]:
        """Split over ranks along an axis; None: held by all of them."""
        axes = {} if axis is None else dict.fromkeys(parameters, axis)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            parameters,
            self._prefix + name,
            axes,
            self._offsets,
            tp_group=self._tp_group,
            dp_cp_group=self._replicas,
        )
        return found

    def striped(
        self,
        name: str,
        parameter: Tensor,
        rows: dict[str, int],
        stored: str = "",
        on_all: Collection[str] = (),
    ) -> dict[str, Any]:
        """A parameter as the tensors of its strips, each split over ranks, or held by all of them
        where it is one of `on_all`; `stored` is its key where that is not its name."""
        lead, replica = len(self._offsets), dist.get_rank(self._replicas)
        rank, ranks = dist.get_rank(self._tp_group), dist.get_world_size(self._tp_group)

        def build(key: str, data: Tensor, *_: Any) -> list[ShardedTensor]:
            strips = []
            parts = data.split(list(rows.values()))
            for strip, part in zip(rows, parts, strict=True):
                place = () if strip in on_all else ((lead, rank, ranks),)
                strips.append(
                    ShardedTensor.from_rank_offsets(
                        f"{key}.{strip}",
                        part,
                        *self._offsets,
                        *place,
                        replica_id=(0, rank if strip in on_all else 0, replica),
                        prepend_axis_num=lead,
                    )
                )
            return strips

        key = self._prefix + (stored or name)
        factory = ShardedTensorFactory(key, parameter, build, torch.cat, (0, 0, replica))
        return {self._prefix + name: factory}
