"""A Mamba-2 mixer in Megatron's distributed checkpoints.

`in_proj` and the convolution are made of strips that tensor-parallel ranks split each by itself, so
each strip is a tensor of its own there: `in_proj.weight.z`, `.x`, `.B`, `.C`, `.dt`, and
`conv1d.weight.x` and so on, as Megatron-Core 0.19's `MambaMixer` writes them.
"""

from __future__ import annotations

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
    from megatron_async.models.mamba import Mamba2Mixer


def mixer_sharded_state_dict(
    mixer: Mamba2Mixer, prefix: str, offsets: tuple, metadata: dict | None
) -> dict[str, Any]:
    """The sharded tensors of a mixer, by parameter name.

    Args:
        mixer: on one of the ranks.
        prefix: of the mixer's names, with a dot at its end.
        offsets: of axes that stand before the parameters' own, Megatron's `sharded_offsets`.
        metadata: Megatron's, or None.
    """
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    replicas = metadata["dp_cp_group"]

    def plain(name: str, parameters: dict[str, Tensor]) -> dict[str, Any]:
        """Split over ranks along the first axis."""
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            parameters,
            prefix + name,
            dict.fromkeys(parameters, 0),
            offsets,
            tp_group=mixer.tp_group,
            dp_cp_group=replicas,
        )
        return found

    def striped(name: str, stored: str, parameter: Tensor, rows: dict[str, int]) -> dict[str, Any]:
        factory = _strips(mixer, prefix + stored, parameter, rows, offsets, dist.get_rank(replicas))
        return {prefix + name: factory}

    sizes = mixer.sizes
    linear: dict[str, Any] = {}
    for name in ("in_proj", "out_proj"):
        layer = getattr(mixer, name)
        linear |= layer.sharded_state_dict(f"{prefix}{name}.", offsets, metadata)
    return (
        linear
        | plain("", {name: getattr(mixer, name) for name in ("dt_bias", "A_log", "D")})
        | plain("norm.", {"weight": mixer.norm.weight})
        | striped("in_proj.weight", "in_proj.weight", mixer.in_proj.weight, sizes.strips)
        | striped("conv1d_weight", "conv1d.weight", mixer.conv1d_weight, sizes.conv_strips)
        | striped("conv1d_bias", "conv1d.bias", mixer.conv1d_bias, sizes.conv_strips)
    )


def _strips(
    mixer: Mamba2Mixer,
    key: str,
    parameter: Tensor,
    rows: dict[str, int],
    offsets: tuple,
    replica: int,
) -> ShardedTensorFactory:
    """A parameter as the tensors of its strips, each split over ranks or held by all of them."""
    lead = len(offsets)
    rank, ranks = dist.get_rank(mixer.tp_group), dist.get_world_size(mixer.tp_group)
    is_single = mixer.whole_sizes.groups == 1

    def build(key: str, data: Tensor, *_: Any) -> list[ShardedTensor]:
        strips = []
        for (name, _rows), part in zip(rows.items(), data.split(list(rows.values())), strict=True):
            held_by_all = is_single and name in ("B", "C")
            place = () if held_by_all else ((lead, rank, ranks),)
            strips.append(
                ShardedTensor.from_rank_offsets(
                    f"{key}.{name}",
                    part,
                    *offsets,
                    *place,
                    replica_id=(0, rank if held_by_all else 0, replica),
                    prepend_axis_num=lead,
                )
            )
        return strips

    return ShardedTensorFactory(key, parameter, build, torch.cat, (0, 0, replica))
