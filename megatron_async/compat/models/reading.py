"""What a model that Megatron built consists of: its layers by kind, and nothing unknown among them.

Megatron's layer spec can put any module anywhere. A module that is not known computes something
that nobody here has read, so it is refused by its path and its class; known are Megatron's own of
its local, its TransformerEngine and its inference spec, by name and package (Megatron-Core 0.19.2,
`models/backends.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import nn

from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, DELTA, EXPERTS, MAMBA, MLP

PACKAGES = ("megatron.core.", "transformer_engine.", "megatron_async.", "torch.nn.")
"""Where known modules come from. (Norms of apex are LayerNorms that need a GPU: not tried.)"""
MODELS = (GPTModel, HybridModel)
ENDS = {
    "embedding": frozenset({"LanguageModelEmbedding", "InferenceEmbedding"}),
    "output_layer": frozenset({"ColumnParallelLinear", "InferenceOutputLayer"}),
    "decoder": frozenset({"TransformerBlock", "HybridStack"}),
    "decoder.final_layernorm": frozenset({"LayerNorm", "RMSNorm"}),
    "decoder.final_norm": frozenset({"LayerNorm", "RMSNorm"}),
}
"""Classes of what is around the layers, by place."""
LAYERS = frozenset({"TransformerLayer", "MoETransformerLayer", "MLPLayer", "MambaLayer"})
ABSENT = frozenset({"IdentityOp", "IdentityFuncOp"})
MIXERS = {
    "SelfAttention": ATTENTION,
    "PagedSelfAttention": ATTENTION,
    "GatedDeltaNet": DELTA,
    "GatedDeltaMixer": DELTA,
    "MambaMixer": MAMBA,
    "Mamba2Mixer": MAMBA,
}
"""Class of a layer's mixer -> character of the layer pattern."""
FFNS = {"MLP": MLP, "InferenceMLP": MLP, "MoELayer": EXPERTS}
"""Class of what follows a mixer -> character of the layer pattern."""
INSIDE = frozenset(
    {
        "ColumnParallelLinear",
        "RowParallelLinear",
        "InferenceColumnParallelLinear",
        "InferenceLayerNormColumnParallelLinear",
        "InferenceRowParallelLinear",
        "TEColumnParallelLinear",
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
        "StackedLinear",
        "LayerNorm",
        "RMSNorm",
        "InferenceRMSNorm",
        "ExtendedRMSNorm",
        "GatedRMSNorm",
        "GatedHeadNorm",
        "Conv1d",
        "SiLU",
        "ModuleList",
        "TopKRouter",
        "InferenceTopKRouter",
        "SequentialMLP",
        "TEGroupedMLP",
        "InferenceGroupedMLP",
        "Experts",
        "SharedExpertMLP",
        "MLP",
    }
)
"""Classes inside a mixer, an MLP or experts."""
CORES = frozenset({"DotProductAttention", "TEDotProductAttention", "PagedCoreAttention"})
"""Classes that compute attention itself: the engine's takes their place, whatever is in them."""
TRAINING_HOOKS = "megatron.core.distributed"
"""Where hooks come from that gather a trained model's parameters; they change no number."""


@dataclass(frozen=True)
class Part:
    """One layer of the layer pattern."""

    kind: str
    """The pattern's character."""
    path: str
    """Path of the module that contains it; for a `GPTModel` this module contains two."""
    layer: Any
    """The module at `path`."""


def unwrapped(model: Any) -> nn.Module:
    """A model without what training wraps around it (`DistributedDataParallel`, `Float16Module`).

    Raises:
        ConfigurationError: it is no module, or a list of virtual pipeline stages.
    """
    if isinstance(model, list | tuple):
        if len(model) != 1:
            raise ConfigurationError(
                f"a list of {len(model)} model chunks (virtual pipeline stages) is not served: "
                "build the model with virtual_pipeline_model_parallel_size=None."
            )
        model = model[0]
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    base = next((kind for kind in MODELS if isinstance(model, kind)), None)
    if base is None:
        raise ConfigurationError(
            f"a {type(model).__name__} is not served: give Megatron-Core's GPTModel or HybridModel."
        )
    for name in ("forward", "_preprocess", "_postprocess"):
        if getattr(type(model), name, None) is not getattr(base, name, None):
            raise ConfigurationError(
                f"a {type(model).__name__} is not served: its {name} differs from "
                f"Megatron-Core's {base.__name__}.{name}, and the engine would not call it."
            )
    found: nn.Module = model
    return found


def parts_of(model: nn.Module) -> list[Part]:
    """The layers of a `GPTModel` or `HybridModel` in the order in which they run.

    Raises:
        ConfigurationError: names each module that is not known.
    """
    decoder: Any = model.decoder
    parts: list[Part] = []
    unknown = list(_strange_ends(model))
    for index, layer in enumerate(decoder.layers):
        path = f"decoder.layers.{index}"
        if _kind(layer) not in LAYERS:
            unknown.append(_named(path, layer))
            continue
        found, strange = _read_layer(path, layer)
        parts += found
        unknown += strange
    unknown += _changed(model)
    if unknown:
        raise ConfigurationError(
            f"this model is not served: {'; '.join(unknown)}. Only modules of Megatron-Core's own "
            "layer specs are known: build the model from one of them, or merge adapters into its "
            "weights."
        )
    return parts


def _read_layer(path: str, layer: Any) -> tuple[list[Part], list[str]]:
    parts: list[Part] = []
    unknown: list[str] = []
    for name, known in (("self_attention", MIXERS), ("mixer", MIXERS), ("mlp", FFNS)):
        block = getattr(layer, name, None)
        if block is None or _kind(block) in ABSENT:
            continue
        if _kind(block) in known:
            parts.append(Part(known[_kind(block)], path, layer))
            unknown += _strangers(f"{path}.{name}", block)
        else:
            unknown.append(_named(f"{path}.{name}", block))
    for name, block in layer.named_children():
        if name in ("self_attention", "mixer", "mlp") or _kind(block) in ABSENT:
            continue
        if _kind(block) not in INSIDE:
            unknown.append(_named(f"{path}.{name}", block))
    return parts, unknown


def _strangers(path: str, block: nn.Module) -> Iterator[str]:
    """Modules inside a known one that are not."""
    for name, child in block.named_children():
        kind, where = _kind(child), f"{path}.{name}"
        if name == "core_attention" and kind in CORES:
            continue
        if kind in INSIDE:
            yield from _strangers(where, child)
        elif kind not in ABSENT:
            yield _named(where, child)


def _strange_ends(model: nn.Module) -> Iterator[str]:
    for path, known in ENDS.items():
        found: Any = model
        for step in path.split("."):
            found = getattr(found, step, None)
        if isinstance(found, nn.Module) and _kind(found) not in known:
            yield _named(path, found)


def _changed(model: nn.Module) -> Iterator[str]:
    """Modules that others have put a hand on: the engine would not call what they put there."""
    for name, module in model.named_modules():
        where = name or "the model"
        if "forward" in vars(module):
            yield f"{where} has a forward of its own"
        for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
            if not str(getattr(hook, "__module__", "")).startswith(TRAINING_HOOKS):
                yield f"{where} has a forward hook ({hook!r})"


def _kind(module: Any) -> str:
    """Name of a module's class, if it is of a package whose names are known; else its whole name,
    which is known nowhere."""
    kind = type(module)
    if f"{kind.__module__}.".startswith(PACKAGES):
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def _named(path: str, module: Any) -> str:
    return f"{path} is a {_kind(module)}"
