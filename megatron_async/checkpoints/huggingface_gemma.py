"""Gemma 2 and 3 in Hugging Face's `config.json`: what other transformers do not have.

Scores of attention and logits may be bounded, embeddings are multiplied by the root of their size,
and Gemma 3's layers with a window turn heads by a base of their own.
"""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.settings import FULL, SLIDING, Settings
from megatron_async.models.architecture import ModelArchitecture

GEMMA = {
    "activation": "fast_gelu",
    "layernorm_zero_centered_gamma": True,
    "has_post_norms": True,
}
"""Fields of `ModelArchitecture` that are the same in all models of these families."""
LOCAL = "rope_local_base_freq"
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def flat_rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The configuration with one set of rope, of full layers, and the base of the others beside it,
    as files had it before transformers 5.

    Raises:
        CheckpointError: the other layers have more than a base.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or not (rope.keys() & {FULL, SLIDING}):
        return config
    local = rope.get(SLIDING) or {}
    rest = rope.keys() - {FULL, SLIDING} or local.keys() - {"rope_type", "rope_theta"}
    if not isinstance(local, dict) or rest or local.get("rope_type", "default") != "default":
        raise CheckpointError(
            f"{where}: rope_parameters = {rope!r:.200} is not supported (only rope_theta of "
            f"{SLIDING!r}, beside {FULL!r})"
        )
    found = {**config, "rope_parameters": rope.get(FULL)}
    if "rope_theta" in local:
        found[LOCAL] = local["rope_theta"]
    return found


def read_gemma(config: Settings) -> dict[str, Any]:
    """Fields of `ModelArchitecture`."""
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("use_bidirectional_attention", False)
    attention, final = (None if config.get(key) is None else config.number(key) for key in CAPS)
    has_base = config.knows(LOCAL)
    if has_base and attention is not None:
        raise config.error(CAPS[0], "is not supported (transformers does not read it)", attention)
    return {
        "attn_logit_softcapping": attention,
        "final_logit_softcapping": final,
        "attention_multiplier": config.number("query_pre_attn_scalar") ** -0.5,
        "embedding_multiplier": config.size("hidden_size") ** 0.5,
        **({"window_rotary_base": config.number(LOCAL)} if has_base else {}),
    }


def of_gemma(a: ModelArchitecture) -> dict[str, Any]:
    """Fields that these families have words for."""
    own = (*CAPS, "attention_multiplier", "window_rotary_base")
    return {name: getattr(a, name) for name in own} | {"embedding_multiplier": a.hidden_size**0.5}


def write_gemma(a: ModelArchitecture, config: dict[str, Any]) -> dict[str, Any]:
    """`config` with what these families have beside it.

    Raises:
        CheckpointError: no scale of attention, or of Gemma 2 a base of rope for windows.
    """
    if a.attention_multiplier is None or (a.window_rotary_base is None) != (
        a.model_type == "gemma2"
    ):
        raise CheckpointError(
            f"a {a.model_type} model with attention_multiplier = {a.attention_multiplier} and "
            f"window_rotary_base = {a.window_rotary_base} has no Hugging Face form; convert to "
            "torch_dist instead"
        )
    scalar = a.attention_multiplier**-2
    if abs(scalar - round(scalar)) < 1e-6 * scalar:
        scalar = round(scalar)
    config = config | {name: getattr(a, name) for name in CAPS}
    config |= {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}
    del config["hidden_act"]
    if a.window_rotary_base is not None:
        local = {"rope_type": "default", "rope_theta": a.window_rotary_base}
        config["rope_parameters"] = {FULL: config["rope_parameters"], SLIDING: local}
        config[LOCAL] = a.window_rotary_base
    return config
