"""Where a weight of the engine's model is in a model that Megatron built.

Both keep Megatron-Core's names, with these differences. A `GPTModel`'s layer is two of the pattern.
TransformerEngine's spec has a norm inside the linear layer behind it
(`linear_qkv.layer_norm_weight`). Experts are a module each (`SequentialMLP`), a weight each of one
module (`weight0`, `weight1` of a grouped linear), or one weight; the engine's are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron_async.compat.models.reading import Part
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, DELTA, EXPERTS, MAMBA, MLP

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
    """Names in `model` of what `name` is in the engine's model: one, or one an expert.

    Args:
        model: Megatron's.
        parts: its layers, as `parts_of` reads them.
        name: of a parameter of the engine's model, whose layers are these parts.

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
    """Names of the experts' weights that are one of the engine's."""
    prefix, _, tail = rest.rpartition("experts.")
    weight = tail.removesuffix(".weight")
    if prefix != "mlp." or weight not in EXPERT_WEIGHTS:
        return
    experts = getattr(part.layer.mlp, "experts", None)
    count = int(getattr(experts, "num_local_experts", 0))
    base = f"{part.path}.mlp.experts"
    yield tuple(f"{base}.local_experts.{index}.{weight}.weight" for index in range(count))
    yield tuple(f"{base}.{weight}.weight{index}" for index in range(count))


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
