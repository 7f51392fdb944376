"""A user's model in the engine's own layers: the same kernels as a model that the engine loaded.

A `HybridModel` of the engine's layer spec is laid out on the meta device, which takes no memory,
and its parameters become the user's: the user's own memory wherever that is possible. Training and
serving the same model (reinforcement learning) then needs no second model, and what the optimizer
writes is what the next step computes with. Where the engine wants another form, it has a copy,
which `refresh` makes again in the same place, because captured steps hold addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from megatron_async.compat.models.names import as_one, source_names, tensor_of, unused_parameters
from megatron_async.compat.models.reading import Part
from megatron_async.errors import ConfigurationError
from megatron_async.models.embedding import shard_vocabulary
from megatron_async.models.hybrid import hybrid_stack_spec
from megatron_async.models.model_config import ModelConfig
from megatron_async.models.pipeline import stage_of
from megatron_async.models.positions import AppliedInAttention, rotary_of


@dataclass
class _Weight:
    """One parameter of the served model, and where it comes from."""

    name: str
    sources: tuple[str, ...]
    is_shared: bool = True
    addresses: tuple[int, ...] = ()
    """Addresses of its sources when it was bound."""


class SharedWeights:
    """Binds the parameters of a served model to those of the user's.

    Args:
        model: the user's.
        parts: its layers.
        served: laid out on the meta device; its parameters get memory when `bind` is called.

    Raises:
        ConfigurationError: a weight is missing in `model`, has another shape, or is one that the
            served model has no place for.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Part], served: nn.Module) -> None:
        self._model, self._served = model, served
        names = [name for name, _ in served.named_parameters()]
        self._weights = [_Weight(name, source_names(model, parts, name)) for name in names]
        unused = unused_parameters(model, {one for w in self._weights for one in w.sources})
        if unused:
            raise ConfigurationError(
                f"this model is not served: nothing here knows what its parameter {unused[0]!r} "
                f"(one of {len(unused)}) is for. Merge adapters into the weights, or serve it with "
                "Megatron-Core's own engine."
            )
        for weight in self._weights:
            weight.is_shared = self._as_it_is(weight) is not None
        left = [name for name, tensor in served.named_buffers() if tensor.is_meta]
        assert not left, f"buffers without memory: {left}"

    @property
    def copied_bytes(self) -> int:
        """Bytes of the weights that are copied."""
        return sum(self._served.get_parameter(name).nbytes for name in self.copied_names)

    @property
    def copied_names(self) -> list[str]:
        """Names in the served model of the weights that are copied."""
        return [weight.name for weight in self._weights if not weight.is_shared]

    def bind(self) -> None:
        """Give the served model its weights, and copies their memory."""
        for weight in self._weights:
            self._bind(weight)

    def refresh(self) -> bool:
        """Make the served weights the user's present ones.

        Returns:
            whether any of them lies elsewhere now, so that steps that were captured before read
            memory that is the model's no more.
        """
        moved = False
        for weight in self._weights:
            moved |= self._rebind(weight)
        return moved

    def _found(self, weight: _Weight) -> list[Tensor]:
        tensors = [tensor_of(self._model, name) for name in weight.sources]
        return [tensor for tensor in tensors if tensor is not None]

    def _rebind(self, weight: _Weight) -> bool:
        sources = self._found(weight)
        kept = self._served.get_parameter(weight.name)
        if not weight.is_shared:
            _copy(kept, sources)
            return False
        if _addresses(sources) == weight.addresses and kept.data_ptr() == weight.addresses[0]:
            return False
        self._bind(weight)
        return True

    def _bind(self, weight: _Weight) -> None:
        sources, template = self._found(weight), self._served.get_parameter(weight.name)
        bound = self._as_it_is(weight)
        weight.is_shared = bound is not None
        if bound is None:
            memory = torch.empty(template.shape, dtype=template.dtype, device=sources[0].device)
            bound = nn.Parameter(memory, requires_grad=False)
            _copy(bound, sources)
        weight.addresses = _addresses(sources)
        where, _, leaf = weight.name.rpartition(".")
        self._served.get_submodule(where).register_parameter(leaf, bound)

    def _as_it_is(self, weight: _Weight) -> nn.Parameter | None:
        """The user's memory in the form that the served model wants; None where it has another."""
        sources, template = self._found(weight), self._served.get_parameter(weight.name)
        _check_shapes(weight, sources, template.shape)
        _check_dtypes(weight, sources, template.dtype)
        one = sources[0] if len(weight.sources) == 1 else as_one(sources)
        if one is None or one.dtype != template.dtype or not one.is_contiguous():
            return None
        if isinstance(one, nn.Parameter):
            return one  # itself, so that memory that training gives it anew is seen at once
        return nn.Parameter(one.detach(), requires_grad=False)


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _copy(target: Tensor, sources: Sequence[Tensor]) -> None:
    with torch.no_grad():
        if len(sources) == 1:
            target.copy_(sources[0])
            return
        for part, source in zip(target, sources, strict=True):
            part.copy_(source)


def _check_shapes(weight: _Weight, sources: Sequence[Tensor], shape: torch.Size) -> None:
    wanted = shape if len(weight.sources) == 1 else shape[1:]
    count = 1 if len(weight.sources) == 1 else shape[0]
    for name, source in zip(weight.sources, sources, strict=True):
        if source.shape != wanted or len(sources) != count:
            raise ConfigurationError(
                f"this model is not served: its {name!r} is {list(source.shape)} of "
                f"{len(sources)}, where its configuration says {list(wanted)} of {count}."
            )


def _check_dtypes(weight: _Weight, sources: Sequence[Tensor], dtype: torch.dtype) -> None:
    for name, source in zip(weight.sources, sources, strict=True):
        if not source.is_floating_point() or torch.promote_types(source.dtype, dtype) != dtype:
            raise ConfigurationError(
                f"this model is not served: its {name!r} is {source.dtype}, and {dtype} would "
                "round it: give the model one dtype, and its configuration's params_dtype."
            )


def own_layers(
    model: Any, parts: Sequence[Part], config: ModelConfig
) -> tuple[nn.Module, SharedWeights]:
    """The served model, on the meta device, and what binds its weights to the user's.

    Args:
        model: the user's, which is not changed.
        parts: its layers.
        config: from `serving_config`.

    Raises:
        ConfigurationError: the layers are not those that the configuration tells, or their weights
            are not.
    """
    stage, found = stage_of(config), "".join(part.kind for part in parts)
    if found != stage.pattern:
        raise ConfigurationError(
            f"the model's layers are {found!r}, where its configuration says {stage.pattern!r} "
            f"(pipeline stage {stage.index} of {stage.count}): moe_layer_freq, "
            "linear_attention_freq or the layer pattern is another than the model was built with."
        )
    with torch.device("meta"):
        served = HybridModel(
            config=config,
            hybrid_stack_spec=hybrid_stack_spec(config),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_sequence_length,
            hybrid_layer_pattern=config.hybrid_layer_pattern,
            pre_process=stage.is_first,
            post_process=stage.is_last,
            parallel_output=False,
            share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
            position_embedding_type="none",
            pg_collection=model.pg_collection,
        )
    shard_vocabulary(served, model.vocab_size)
    served.mtp = None
    served.to(dtype=config.params_dtype)
    for module in served.modules():
        for name in getattr(module, "float32_parameters", ()):
            kept = getattr(module, name)
            if kept is not None:
                kept.data = kept.data.float()
    weights = SharedWeights(model, parts, served)
    # What `take_over_positions` asks: the angles are the user's, whichever layer applies them.
    served.position_embedding_type = model.position_embedding_type
    rotary = rotary_of(model)
    if rotary is not None:
        served.rotary_pos_emb = AppliedInAttention(rotary)
    return served.eval(), weights
