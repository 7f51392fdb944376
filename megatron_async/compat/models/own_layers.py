"""A user's model in the engine's own layers: the same kernels as a model that the engine loaded.

A `HybridModel` of the engine's layer spec is laid out on the meta device, which takes no memory,
and its parameters become the user's: the user's own memory wherever that is possible. Training and
serving the same model (reinforcement learning) then needs no second model, and what the optimizer
writes is what the next step computes with. Where the engine wants another form, it has a copy,
which `refresh` makes again in the same place, because captured steps hold addresses.

Both models keep Megatron-Core's names, with these differences. A `GPTModel`'s layer is two of the
pattern. TransformerEngine's spec has a norm inside the linear layer behind it
(`linear_qkv.layer_norm_weight`). Experts are a module each (`SequentialMLP`), a weight each of one
module (`weight0`, `weight1` of a grouped linear), or one weight; the engine's are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_async.compat.models.refusals import Part
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, DELTA, EXPERTS, MAMBA, MLP
from megatron_async.models.hybrid import lay_out
from megatron_async.models.hybrid_stack import hybrid_stack_spec
from megatron_async.models.model_config import ModelConfig
from megatron_async.models.pipeline import stage_of
from megatron_async.models.rotary import AppliedInAttention, rotary_of

OTHER_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    ATTENTION: {"input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight",)},
    MLP: {"pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",)},
    EXPERTS: {},
    MAMBA: {"norm.weight": ("mixer.in_proj.layer_norm_weight",)},
    DELTA: {"input_layernorm.weight": ("self_attention.in_proj.layer_norm_weight",)},
}
"""By the kind of a layer: the engine's name of a weight in it -> others that Megatron has."""
TOP: dict[str, tuple[str, ...]] = {
    "decoder.final_norm.weight": ("decoder.final_norm.weight", "decoder.final_layernorm.weight"),
}
"""Other names of weights outside layers; a weight that is missing here has one name."""
EXPERT_WEIGHTS = ("linear_fc1", "linear_fc2")
IGNORED = ("mtp.", "rotary_pos_emb.")
"""Beginnings of names of parameters that the engine needs not: multi-token prediction only drafts,
and rope is asked for its frequencies."""


def tensor_of(model: nn.Module, name: str) -> Tensor | None:
    """A parameter or buffer by its dotted name; None if there is none."""
    found: object = model
    for step in name.split("."):
        found = getattr(found, step, None)
    return found if isinstance(found, Tensor) else None


def source_names(model: nn.Module, parts: Sequence[Part], name: str) -> tuple[str, ...]:
    """Names in Megatron's model, of these layers, of what `name` is in the engine's model: one, or
    one an expert.

    Raises:
        ConfigurationError: it is nowhere; names both.
    """
    candidates: list[tuple[str, ...]]
    steps = name.split(".", 3)
    if steps[:2] != ["decoder", "layers"]:
        candidates = [(one,) for one in TOP.get(name, (name,))]
    else:
        part, rest = parts[int(steps[2])], steps[3]
        others = OTHER_NAMES[part.kind].get(rest, ())
        candidates = [(f"{part.path}.{one}",) for one in (rest, *others)]
        candidates += _of_experts(model, part, rest)
    for names in candidates:
        if names and all(tensor_of(model, one) is not None for one in names):
            return names
    tried = ", ".join(repr(names[0]) for names in candidates if names)
    raise ConfigurationError(
        f"this model is not served: it has none of {tried}, which would be {name!r} here."
    )


def _of_experts(model: nn.Module, part: Part, rest: str) -> Iterator[tuple[str, ...]]:
    """Names of the experts' weights, or biases, that are one of the engine's."""
    prefix, _, tail = rest.rpartition("experts.")
    weight, _, kind = tail.partition(".")
    if prefix != "mlp." or weight not in EXPERT_WEIGHTS:
        return
    experts = getattr(part.layer.mlp, "experts", None)
    count = int(getattr(experts, "num_local_experts", 0))
    base = f"{part.path}.mlp.experts"
    yield tuple(f"{base}.local_experts.{index}.{weight}.{kind}" for index in range(count))
    yield tuple(f"{base}.{weight}.{kind}{index}" for index in range(count))


def unused_parameters(model: nn.Module, used: set[str]) -> list[str]:
    """Names of parameters that no weight of the engine's model is made from: whatever they do would
    not be done."""
    return [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name not in used and not name.startswith(IGNORED)
    ]


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors as one, `[count, ...]`, without a copy; None where they do not lie one behind the
    other in one storage. (Megatron's `InferenceGroupedMLP` lays its experts out like this.)"""
    first, size = tensors[0], tensors[0].numel()
    storage = first.untyped_storage().data_ptr()
    for index, tensor in enumerate(tensors):
        same = tensor.shape == first.shape and tensor.dtype == first.dtype
        beside = tensor.untyped_storage().data_ptr() == storage
        if not (same and beside and tensor.is_contiguous()):
            return None
        if tensor.storage_offset() != first.storage_offset() + index * size:
            return None
    with torch.no_grad():
        shape = (len(tensors), *first.shape)
        return first.detach().as_strided(shape, (size, *first.stride()), first.storage_offset())


@dataclass
class _Weight:
    """One parameter of the served model, and where it comes from."""

    name: str
    sources: tuple[str, ...]
    is_shared: bool = True
    was_shared: bool = True
    """When the model was first served."""
    addresses: tuple[int, ...] = ()
    """Addresses of its sources when it was bound."""


class SharedWeights:
    """Binds the parameters of a served model, laid out on the meta device, to those of the user's;
    they get memory when `bind` is called.

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
            weight.is_shared = weight.was_shared = self._as_it_is(weight) is not None
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

    def check(self) -> None:
        """Raise `ConfigurationError` where the user's weights have another shape or dtype now."""
        for weight in self._weights:
            self._as_it_is(weight)

    def shared_addresses(self) -> list[int]:
        """Where the user's weights lie that were shared at first: where one lies elsewhere, steps
        that were captured before read memory that is the model's no more."""
        shared = [weight for weight in self._weights if weight.was_shared]
        return [address for weight in shared for address in _addresses(self._found(weight))]

    def refresh(self) -> None:
        """Make the served weights the user's present ones."""
        for weight in self._weights:
            self._rebind(weight)

    def _found(self, weight: _Weight) -> list[Tensor]:
        tensors = [tensor_of(self._model, name) for name in weight.sources]
        return [tensor for tensor in tensors if tensor is not None]

    def _rebind(self, weight: _Weight) -> None:
        sources = self._found(weight)
        kept = self._served.get_parameter(weight.name)
        if not weight.is_shared:
            _copy(kept, sources)
        elif _addresses(sources) != weight.addresses or kept.data_ptr() != weight.addresses[0]:
            self._bind(weight)

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
    """The served model, on the meta device, and what binds its weights to the user's, which is not
    changed.

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
    served = lay_out(
        config,
        hybrid_stack_spec(config),
        model.pg_collection,
        model.vocab_size,
        model.max_sequence_length,
        model.share_embeddings_and_output_weights,
    )
    weights = SharedWeights(model, parts, served)
    # What `take_over_positions` asks: the angles are the user's, whichever layer applies them.
    served.position_embedding_type = model.position_embedding_type
    rotary = rotary_of(model)
    if rotary is not None:
        served.rotary_pos_emb = AppliedInAttention(rotary)
    return served.eval(), weights
