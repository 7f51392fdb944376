"""What changes the computation of a user's model, and is not served: fields of Megatron's
`TransformerConfig`, and single modules.

The modules of a model tell most of what it is (`reading.py`), its parameters the rest
(`own_layers.py`). What neither shows is a number or a switch in the configuration: it is read
here. `models/fitness.py` checks the rest once the served model is there, such as rope and windows.

A layer spec, or a hand on a finished model, can give a module another epsilon, mask or
configuration than the model's. The engine's layers, which go by the
configuration, would not follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from torch import nn

from megatron_async.compat.models.reading import Part
from megatron_async.errors import ConfigurationError
from megatron_async.models.fitness import GATED
from megatron_async.models.model_config import ModelConfig

NOWHERE: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None, "gated_delta_net"),
    "heterogeneous_block_specs": (False,),
    "softmax_type": ("vanilla",),
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
    "add_bias_linear": (False,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0,),
}
"""Fields and values that the engine's own layers serve; a model with another value runs in
Megatron's modules."""


def check_config(config: Any) -> None:
    """Check that a configuration asks for nothing that would be ignored.

    Raises:
        ConfigurationError: with all that is not served.
    """
    found = list(_other_values(config, NOWHERE))
    ranks = config.tensor_model_parallel_size
    if config.num_moe_experts and config.expert_tensor_parallel_size not in (None, ranks):
        found.append(
            f"expert_tensor_parallel_size={config.expert_tensor_parallel_size}, where experts are "
            f"split as the rest is (tensor_model_parallel_size={ranks})"
        )
    refuse(found)


def gaps(config: Any, position_embedding_type: str) -> list[str]:
    """Why a model cannot run in the engine's own layers; empty where it can.

    Args:
        config: of the model.
        position_embedding_type: of the model.
    """
    found = list(_other_values(config, NATIVE))
    if config.activation_func is not GATED[config.gated_linear_unit]:
        name = getattr(config.activation_func, "__name__", repr(config.activation_func))
        found.append(f"activation_func={name} with gated_linear_unit={config.gated_linear_unit}")
    if position_embedding_type == "learned_absolute":
        found.append(f"position_embedding_type={position_embedding_type!r}")
    return found


def refuse(reasons: list[str]) -> None:
    """Raise if there are reasons not to serve a model.

    Raises:
        ConfigurationError: with all of them.
    """
    if reasons:
        raise ConfigurationError(
            f"this model is not served, because of {'; '.join(dict.fromkeys(reasons))}. Change "
            "that, or serve the model with Megatron-Core's own engine."
        )


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
