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

from torch import nn

from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, DELTA, EXPERTS, MAMBA, MLP

PACKAGES = ("megatron.core.", "transformer_engine.", "megatron_async.", "torch.nn.")
"""Where known modules come from. (Norms of apex are LayerNorms that need a GPU: not tried.)"""
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
    """Its character."""
    path: str
    """Of the module that holds it, which for a `GPTModel` holds two."""
    layer: Any
    """That module."""


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
    if not isinstance(model, nn.Module) or not hasattr(model, "decoder"):
        raise ConfigurationError(
            f"a {type(model).__name__} is not served: give Megatron-Core's GPTModel or HybridModel."
        )
    return model


def parts_of(model: nn.Module) -> list[Part]:
    """The layers of a `GPTModel` or `HybridModel` in the order in which they run.

    Raises:
        ConfigurationError: names each module that is not known.
    """
    decoder: Any = model.decoder
    parts: list[Part] = []
    unknown: list[str] = []
    for index, layer in enumerate(decoder.layers):
        path = f"decoder.layers.{index}"
        if _kind(layer) not in LAYERS:
            unknown.append(_named(path, layer))
            continue
        found, strange = _read_layer(path, layer)
        parts += found
        unknown += strange
    unknown += _hooked(model)
    if unknown:
        raise ConfigurationError(
            f"this model is not served: {'; '.join(unknown)}. Only modules of Megatron-Core's own "
            "layer specs are known: build the model from one of them, or merge adapters into its "
            "weights."
        )
    return parts


def _read_layer(path: str, layer: Any) -> tuple[list[Part], list[str]]:
    parts, unknown = [], []
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


def _hooked(model: nn.Module) -> Iterator[str]:
    """Modules whose output others have put a hand on: the engine would not call their hooks."""
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        for hook in hooks:
            if not str(getattr(hook, "__module__", "")).startswith(TRAINING_HOOKS):
                yield f"{name or 'the model'} has a forward hook ({hook!r})"


def _kind(module: Any) -> str:
    """Name of a module's class, if it is of a package whose names are known; else its whole name,
    which is known nowhere."""
    kind = type(module)
    if f"{kind.__module__}.".startswith(PACKAGES):
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def _named(path: str, module: Any) -> str:
    return f"{path} is a {_kind(module)}"
