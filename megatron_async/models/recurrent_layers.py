"""`RecurrentMixer`: the common base of mixers of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn

from megatron_async.models.sizes import SIZES_OF, RecurrentSizes
from megatron_async.models.step_view import RecurrentStepView
from megatron_async.ops.linear.stream import Stream


class RecurrentMixer[Sizes: RecurrentSizes](MegatronModule):
    """A module whose convolution and recurrence `RecurrentStepView.recurrent` computes, between two
    products.

    `in_proj` and the convolution consist of strips. Tensor-parallel ranks split each strip
    separately, so each is a tensor of its own in Megatron's distributed checkpoints, as
    Megatron-Core 0.19's `MambaMixer` and `GatedDeltaNet` write them: `in_proj.weight.z`, `.x`,
    `.B`, `.C`, `.dt` and `conv1d.weight.x` of Mamba-2, and so on.

    Attributes:
        whole_sizes, sizes: of all ranks together, and of this one.
        state_layer_index: this module's layer in the state pool; see `stamp_state_layers`.
        kind: the character of the layer pattern.
        megatrons: name of Megatron-Core's class.
        served: fields of the configuration, and the one value of each that is served.
        per_head: parameters of one number a head.
        norm_name: of the norm behind the recurrence.
        norm_axis: along which ranks share the norm's weight; None: each has it whole.
        convolution: parameters of the convolution, and their names in checkpoints.
    """

    state_layer_index: int = -1
    kind: ClassVar[str]
    megatrons: ClassVar[str]
    served: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    per_head: ClassVar[tuple[str, ...]]
    norm_name: ClassVar[str]
    norm_axis: ClassVar[int | None]
    convolution: ClassVar[Mapping[str, str]]

    def __init__(
        self,
        config: TransformerConfig,
        hidden: int,
        tp_group: dist.ProcessGroup,
        in_proj: Callable[..., Any],
    ) -> None:
        super().__init__(config)
        self.whole_sizes = cast(Sizes, SIZES_OF[self.kind].of(config))
        self.tp_group = tp_group
        self.sizes = self.whole_sizes.of_rank(tp_group.size())
        self._linear = {"bias": False, "is_expert": False, "tp_group": tp_group}
        self.in_proj = in_proj(
            hidden,
            self.sizes.in_proj * tp_group.size(),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **self._linear,
        )

    def _output(self, out_proj: Callable[..., Any], hidden: int) -> Any:
        """The second product, of all ranks' channels."""
        return out_proj(
            self.whole_sizes.channels,
            hidden,
            config=self.config,
            init_method=self.config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **self._linear,
        )

    @property
    def on_all(self) -> Collection[str]:
        """Strips that are on every rank."""
        return ()

    def mixed(self, projected: Tensor, view: RecurrentStepView) -> Tensor:
        """What the second product takes: `[tokens, sizes.in_proj]` or more rows of the first one's
        output to `[tokens, channels]`."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: RecurrentStepView | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output for one step, called by TransformerEngine's stack: `[tokens, 1,
        hidden]` -> the same, and None.

        Raises:
            RuntimeError: called without a view (training and static batching are not served).
        """
        if inference_context is None:
            raise RuntimeError(
                f"{type(self).__name__} runs only inside the engine: it was called without an "
                f"inference_context. Use Megatron-Core's own {self.megatrons} to train."
            )
        projected, _unused = self.in_proj(hidden_states)
        output, bias = self.out_proj(self.mixed(projected.squeeze(1), inference_context)[:, None])
        return output, bias

    def run(self, stream: Stream, view: RecurrentStepView, may_split: bool) -> Stream:
        """The stream behind this layer and the norm before it: `models/decoder_layer.py`."""
        projected = self.in_proj.product(stream, self.in_proj.choose(stream))
        return self.out_proj.add(self.mixed(projected, view), stream, may_split)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Megatron's form, by parameter name: products and the convolution strip by strip."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        found: dict[str, Any] = {}
        for name in ("in_proj", "out_proj"):
            product = getattr(self, name)
            found |= product.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        weight = {"weight": getattr(self, self.norm_name).weight}
        for name, parameters, axis in (
            ("", {name: getattr(self, name) for name in self.per_head}, 0),
            (f"{self.norm_name}.", weight, self.norm_axis),
        ):
            found |= make_sharded_tensors_for_checkpoint(
                parameters,
                prefix + name,
                {} if axis is None else dict.fromkeys(parameters, axis),
                sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
        replica = dist.get_rank(metadata["dp_cp_group"])
        stored = {"in_proj.weight": "in_proj.weight", **self.convolution}
        for name, key in stored.items():
            sizes = self.sizes.conv_strips if name in self.convolution else self.sizes.strips
            parameter = self.get_parameter(name)
            found[prefix + name] = self._striped(
                prefix + key, parameter, sizes, sharded_offsets, replica
            )
        return found

    def _striped(
        self, key: str, parameter: Tensor, rows: dict[str, int], offsets: tuple, replica: int
    ) -> ShardedTensorFactory:
        """A parameter as the tensors of its strips, each split over ranks, or held by all of them
        where it is one of `on_all`."""
        lead, on_all = len(offsets), self.on_all
        rank, ranks = dist.get_rank(self.tp_group), dist.get_world_size(self.tp_group)

        def build(key: str, data: Tensor, *_: Any) -> list[ShardedTensor]:
            strips = []
            parts = data.split(list(rows.values()))
            for strip, part in zip(rows, parts, strict=True):
                place = () if strip in on_all else ((lead, rank, ranks),)
                strips.append(
                    ShardedTensor.from_rank_offsets(
                        f"{key}.{strip}",
                        part,
                        *offsets,
                        *place,
                        replica_id=(0, rank if strip in on_all else 0, replica),
                        prepend_axis_num=lead,
                    )
                )
            return strips

        return ShardedTensorFactory(key, parameter, build, torch.cat, (0, 0, replica))


def stamp_state_layers(model: nn.Module) -> int:
    """Number the recurrent mixers of `model` in execution order; return their number."""
    mixers = [module for module in model.modules() if isinstance(module, RecurrentMixer)]
    for index, mixer in enumerate(mixers):
        mixer.state_layer_index = index
    return len(mixers)
