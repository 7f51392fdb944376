"""What a model that Megatron built consists of, and what of it is not served.

Megatron's layer spec can put any module anywhere. A module that is not known computes something
that nobody here has read, so it is refused by its path and its class; known are Megatron's own of
its local, its TransformerEngine and its inference spec, by name and package (Megatron-Core 0.19.2,
`models/backends.py`).

The modules of a model tell most of what it is, its parameters the rest (`own_layers.py`). What
neither shows is a number or a switch in the configuration: fields of Megatron's `TransformerConfig`
are read here. `models/fitness.py` checks the rest once the served model is there, such as rope and
windows.

A layer spec, or a hand on a finished model, can give a module another epsilon, mask or
configuration than the model's. The engine's layers, which go by the configuration, would not
follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.enums import AttnMaskType
from torch import nn

from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, DELTA, EXPERTS, MAMBA, MLP
from megatron_async.models.fitness import refuse, strange_activation
from megatron_async.models.model_config import ModelConfig

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


NOWHERE: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None, "gated_delta_net"),
    "heterogeneous_block_specs": (False,),
    "softmax_type": ("vanilla", "learnable", "off-by-one"),
    "qk_l2_norm": (False,),
    "context_parallel_size": (1,),
    "gtp_weight_remat_size": (1,),
    "expert_gtp_weight_remat_size": (1,),
    "fp32_residual_connection": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "fp8": (None,),
    "fp4": (None,),
    "quant_recipe": (None,),
    "use_kitchen": (False,),
    "use_transformer_engine_op_fuser": (False,),
    "moe_router_load_balancing_type": (
        "none",
        "aux_loss",
        "seq_aux_loss",
        "global_aux_loss",
    ),
    "moe_router_num_groups": (None,),
    "moe_router_group_topk": (None,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_force_biased": (None,),
    "moe_expert_capacity_factor": (None,),
    "moe_expert_rank_capacity_factor": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
}
"""Fields and the values of each that are served at all."""
NATIVE: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
}
"""Fields and values that the engine's own layers serve; a model with another value runs in
Megatron's modules."""


def check_config(config: Any) -> None:
    """Refuse a configuration that asks for what would be ignored."""
    found = list(_other_values(config, NOWHERE))
    ranks = config.tensor_model_parallel_size
    if config.num_moe_experts and config.expert_tensor_parallel_size not in (None, ranks):
        found.append(
            f"expert_tensor_parallel_size={config.expert_tensor_parallel_size}, where experts are "
            f"split as the rest is (tensor_model_parallel_size={ranks})"
        )
    refuse(found)


def gaps(config: Any, position_embedding_type: str) -> list[str]:
    """Why a model of this configuration cannot run in the engine's own layers; empty where it
    can."""
    found = [*_other_values(config, NATIVE), *strange_activation(config)]
    if position_embedding_type == "learned_absolute":
        found.append(f"position_embedding_type={position_embedding_type!r}")
    return found


def _other_values(config: Any, served: dict[str, tuple[Any, ...]]) -> Iterator[str]:
    for name, values in served.items():
        mine = getattr(config, name, values[0])
        if isinstance(mine, list):
            others = [one for one in mine if one not in values]
            if others:
                yield f"{name}={mine}"
        elif mine not in values:
            yield f"{name}={mine!r}"


NORMS = ("layernorm", "norm", "linear_qkv", "linear_fc1", "in_proj")
"""Ends of names of modules that normalise, alone or before their product."""
MASKS = (AttnMaskType.causal, AttnMaskType.padding_causal)


def strange_facts(model: Any, parts: Sequence[Part], config: ModelConfig) -> list[str]:
    """What modules of the user's model say otherwise than the configuration that it is served with;
    empty where all agree."""
    found: list[str] = []
    for name, module in model.named_modules():
        if name.startswith(("decoder.", "output_layer")) and name.endswith(NORMS):
            found += _norm(name, module, config)
    for part in parts:
        own = getattr(part.layer, "config", model.config)
        if own is not model.config and vars(own) != vars(model.config):
            found.append(f"a configuration of its own of {part.path}")
        attention = getattr(part.layer, "self_attention", None)
        mask = getattr(attention, "attn_mask_type", AttnMaskType.causal)
        if mask not in MASKS:
            found.append(f"attn_mask_type={mask.name} of {part.path}.self_attention")
    return found


def _norm(name: str, module: nn.Module, config: ModelConfig) -> Iterator[str]:
    wanted = config.layernorm_epsilon
    if name.endswith("mixer.norm"):
        wanted = config.mamba_norm_epsilon
    eps = getattr(module, "eps", None)
    if eps is not None and eps != wanted:
        yield f"an epsilon of {eps} of {name}, where its configuration says {wanted}"
    centered = getattr(module, "zero_centered_gamma", None)
    if centered is not None and bool(centered) != bool(config.layernorm_zero_centered_gamma):
        yield (
            f"zero_centered_gamma={centered} of {name}, where its configuration says "
            f"{config.layernorm_zero_centered_gamma}"
        )
    kind = type(module).__name__
    if kind == "LayerNorm" or getattr(module, "normalization", "RMSNorm") == "LayerNorm":
        yield f"a LayerNorm at {name}, where its configuration says RMSNorm"
