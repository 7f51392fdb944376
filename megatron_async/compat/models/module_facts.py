"""What single modules of a user's model say, where the engine's own layers go by the configuration.

A layer spec, or a hand on a finished model, can give a module another epsilon, mask or
configuration than the model's. The engine's layers would not follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from torch import nn

from megatron_async.compat.models.reading import Part
from megatron_async.models.model_config import ModelConfig

NORMS = ("layernorm", "norm", "linear_qkv", "linear_fc1", "in_proj")
"""Ends of names of modules that normalise, alone or before their product."""
MASKS = (AttnMaskType.causal, AttnMaskType.padding_causal)


def strange_facts(model: Any, parts: Sequence[Part], config: ModelConfig) -> list[str]:
    """What modules say otherwise than the configuration; empty where all agree.

    Args:
        model: the user's.
        parts: its layers.
        config: that it is served with.
    """
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
