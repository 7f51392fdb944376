"""Shapes of `dummy:SHAPE` models, which have random weights, to measure speed: well-known ones, and
those that a name spells out: `llama:layers=40,hidden=5120,heads=32,groups=8,ffn=14336,...`.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from megatron_async.models.architecture import YARN, ModelArchitecture, RopeScaling, yarn_factor
from megatron_async.models.sizes import size_problem

GPT_OSS: dict[str, Any] = {
    "rotary_base": 150000.0,
    "rope_scaling": RopeScaling(
        32.0,
        original_max_position_embeddings=4096,
        kind=YARN,
        truncate=False,
        attention_factor=yarn_factor(32.0, None, None),
    ),
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "window_attn_skip_freq": 2,
    "add_qkv_bias": True,
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "activation": "quick_gelu",
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 2880,
}
"""Both sizes of gpt-oss."""
# fmt: off
DUMMY_SHAPES: dict[str, ModelArchitecture] = {
    "tiny": ModelArchitecture(
        "llama", 2, 64, 4, 2, 16, 128, 512, tie_word_embeddings=True, max_position_embeddings=4096
    ),
    "smollm2-135m": ModelArchitecture(
        "llama", 30, 576, 9, 3, 64, 1536, 49152, rotary_base=100000.0, tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    "qwen3-0.6b": ModelArchitecture(
        "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 1e-6, 1000000.0, qk_layernorm=True,
        tie_word_embeddings=True, max_position_embeddings=40960,
    ),
    "qwen2-0.5b": ModelArchitecture(
        "qwen2", 24, 896, 14, 2, 64, 4864, 151936, 1e-6, 1000000.0, add_qkv_bias=True,
        tie_word_embeddings=True, max_position_embeddings=32768,
    ),
    "llama-3.2-1b": ModelArchitecture(
        "llama", 16, 2048, 32, 8, 64, 8192, 128256, 1e-5, 500000.0,
        RopeScaling(32.0, 1.0, 4.0, 8192), tie_word_embeddings=True, max_position_embeddings=131072,
    ),
    "llama-3.1-8b": ModelArchitecture(
        "llama", 32, 4096, 32, 8, 128, 14336, 128256, 1e-5, 500000.0,
        RopeScaling(8.0, 1.0, 4.0, 8192), max_position_embeddings=131072,
    ),
    "qwen3-8b": ModelArchitecture(
        "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 1e-6, 1000000.0, qk_layernorm=True,
        max_position_embeddings=40960,
    ),
    "gpt-357m": ModelArchitecture(
        "nemotron_h", 48, 1024, 16, 16, 64, 4096, 51200, tie_word_embeddings=True,
        pattern="*-" * 24, activation="squared_relu", position_embedding_type="none",
        mamba_num_heads=16, mamba_head_dim=64, mamba_state_dim=128, mamba_num_groups=1,  # unused
    ),
    "gpt-12b": ModelArchitecture(
        "llama", 40, 5120, 32, 8, 128, 14336, 131072, 1e-5, 1000000.0,
        max_position_embeddings=131072,
    ),
    "tiny-moe": ModelArchitecture(
        "mixtral", 2, 64, 4, 2, 16, 128, 512, tie_word_embeddings=True,
        max_position_embeddings=4096, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64,
    ),
    "mixtral-8x7b": ModelArchitecture(
        "mixtral", 32, 4096, 32, 8, 128, 14336, 32000, 1e-5, 1000000.0,
        max_position_embeddings=32768, num_moe_experts=8, moe_router_topk=2,
        moe_ffn_hidden_size=14336,
    ),
    "qwen3-30b-a3b": ModelArchitecture(
        "qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, 1e-6, 1000000.0, qk_layernorm=True,
        max_position_embeddings=40960, num_moe_experts=128, moe_router_topk=8,
        moe_ffn_hidden_size=768,
    ),
    "gpt-oss-20b": ModelArchitecture(
        "gpt_oss", 24, 2880, 64, 8, 64, 2880, 201088, num_moe_experts=32, **GPT_OSS
    ),
    "gpt-oss-120b": ModelArchitecture(
        "gpt_oss", 36, 2880, 64, 8, 64, 2880, 201088, num_moe_experts=128, **GPT_OSS
    ),
    "tiny-hybrid": ModelArchitecture(
        "nemotron_h", 6, 64, 4, 2, 16, 96, 512, max_position_embeddings=4096, pattern="MEM*-E",
        activation="squared_relu", position_embedding_type="none", num_moe_experts=8,
        moe_router_topk=2, moe_ffn_hidden_size=48, moe_shared_expert_intermediate_size=64,
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5, mamba_num_heads=8, mamba_head_dim=16,
        mamba_state_dim=32, mamba_num_groups=2,
    ),
    "nemotron-h-8b": ModelArchitecture(
        "nemotron_h", 52, 4096, 32, 8, 128, 21504, 131072, max_position_embeddings=8192,
        pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-", activation="squared_relu",
        position_embedding_type="none", mamba_num_heads=128, mamba_head_dim=64, mamba_state_dim=128,
        mamba_num_groups=8,
    ),
    "nemotron-3-nano-30b": ModelArchitecture(
        "nemotron_h", 52, 2688, 32, 2, 128, 1856, 131072, max_position_embeddings=262144,
        pattern="MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME", activation="squared_relu",
        position_embedding_type="none", num_moe_experts=128, moe_router_topk=6,
        moe_ffn_hidden_size=1856, moe_shared_expert_intermediate_size=3712,
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5, mamba_num_heads=64, mamba_head_dim=64,
        mamba_state_dim=128, mamba_num_groups=8,
    ),
    "granite-4.0-h-350m": ModelArchitecture(
        "granitemoehybrid", 32, 768, 12, 4, 64, 2048, 100352, tie_word_embeddings=True,
        max_position_embeddings=32768,
        pattern="".join("*-" if n in (10, 13, 17, 27) else "M-" for n in range(32)),
        position_embedding_type="none", mamba_num_heads=48, mamba_head_dim=32, mamba_state_dim=128,
        mamba_num_groups=1, embedding_multiplier=12.0, logits_scaling=3.0,
        residual_multiplier=0.246, attention_multiplier=0.015625,
    ),
    "tiny-gated-delta": ModelArchitecture(
        "qwen3_next", 3, 64, 4, 2, 16, 96, 512, 1e-6, max_position_embeddings=4096,
        pattern="GEG-*E", rotary_percent=0.5, qk_layernorm=True, attention_output_gate=True,
        layernorm_zero_centered_gamma=True, num_moe_experts=8, moe_router_topk=2,
        moe_ffn_hidden_size=48, moe_shared_expert_intermediate_size=64, moe_shared_expert_gate=True,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "qwen3-next-80b": ModelArchitecture(
        "qwen3_next", 36, 2048, 16, 2, 256, 0, 151936, 1e-6, 10000000.0,
        max_position_embeddings=262144, pattern="GEGEGE*E" * 9, rotary_percent=0.25,
        qk_layernorm=True, attention_output_gate=True, layernorm_zero_centered_gamma=True,
        num_moe_experts=512, moe_router_topk=10, moe_ffn_hidden_size=512,
        moe_shared_expert_intermediate_size=512, moe_shared_expert_gate=True,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
}
# fmt: on
DUMMY_SHAPES |= {
    "tiny-mtp": replace(DUMMY_SHAPES["tiny"], mtp_pattern="*-", mtp_num_depths=1),
    "tiny-hybrid-mtp": replace(
        DUMMY_SHAPES["tiny-hybrid"],
        mtp_pattern="*E",
        mtp_num_depths=1,
        mtp_use_repeated_layer=True,
    ),
    "tiny-gated-delta-mtp": replace(
        DUMMY_SHAPES["tiny-gated-delta"], mtp_pattern="*E", mtp_num_depths=1
    ),
    "llama-3.1-8b-mtp": replace(DUMMY_SHAPES["llama-3.1-8b"], mtp_pattern="*-", mtp_num_depths=1),
    "nemotron-3-nano-30b-mtp": replace(
        DUMMY_SHAPES["nemotron-3-nano-30b"],
        mtp_pattern="*E",
        mtp_num_depths=1,
        mtp_use_repeated_layer=True,
    ),
    "qwen3-next-80b-mtp": replace(
        DUMMY_SHAPES["qwen3-next-80b"],
        mtp_pattern="*E",
        mtp_num_depths=1,
        mtp_use_repeated_layer=True,
    ),
    "qwen3.5-35b-a3b-mtp": replace(
        DUMMY_SHAPES["qwen3-next-80b"],
        model_type="qwen3_5_moe",
        num_layers=40,
        vocab_size=248320,
        pattern="GEGEGE*E" * 10,
        num_moe_experts=256,
        moe_router_topk=8,
        mtp_pattern="*E",
        mtp_num_depths=1,
        mtp_use_repeated_layer=True,
    ),
}
"""Shapes for `dummy:SHAPE` models (random weights), from the models' public `config.json` files.

Those with "-mtp" have one depth of multi-token prediction besides: "nemotron-3-nano-30b-mtp" as in
Nemotron 3.5 Lightning 30B-A3B, whose layers have these sizes; "qwen3-next-80b-mtp" as in
Qwen3-Next and "qwen3.5-35b-a3b-mtp" as in Qwen3.5-35B-A3B, applied again for further drafts;
"llama-3.1-8b-mtp" one as if that model were published with it, a layer of its own kind.

"qwen3-next-80b" has 36 of that model's 48 layers, so that its weights, 120 GB in bfloat16, fit one
GPU of 141 GB; each layer has its published size.

"gpt-357m" and "gpt-12b" are the models of Megatron-LM's scripts `gpt_dynamic_inference_357m.sh` and
`gpt_dynamic_inference_12b.sh` (`examples/inference/gpt/`). The second is Mistral-NeMo's shape. The
first has GPT-2's matrices, in the layers of Nemotron-H (which counts attention and MLPs apart):
squared ReLU stands for GELU; learned positions and biases, 0.7 % of the weights, are left out. 357
million are those of a vocabulary that is padded to 51,200."""


_QWEN = {"layernorm_epsilon": 1e-6, "rotary_base": 1e6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rotary_base": 5e5},
    "qwen2": {**_QWEN, "add_qkv_bias": True},
    "qwen3": {**_QWEN, "qk_layernorm": True},
    "mixtral": {"rotary_base": 1e6},
    "qwen3_moe": {**_QWEN, "qk_layernorm": True},
}
"""Conventions by Hugging Face's family names; output and embedding are two matrices."""
WITH_EXPERTS = ("mixtral", "qwen3_moe")
DUMMY_FORMS = ("int4", "mxfp4", "nvfp4")
"""Numbers that a dummy model's linear layers and experts may be made of."""

_NEEDED = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "ffn_hidden_size",
    "vocab": "vocab_size",
}
_OPTIONAL = {
    "groups": "num_query_groups",
    "head": "kv_channels",
    "positions": "max_position_embeddings",
}
_OF_EXPERTS = {"experts": "num_moe_experts", "topk": "moe_router_topk"}
MOST_DIGITS = 18
POSITIONS = 32768
EXAMPLE = "layers=40,hidden=5120,heads=32,groups=8,head=128,ffn=14336,vocab=131072"


def shape_by_hand(family: str, text: str) -> ModelArchitecture:
    """The architecture of one of `FAMILIES` with the sizes of a text, `KEY=SIZE,KEY=SIZE,...`, each
    key once.

    `groups` (KV heads) are as many as `heads` where the text does not say, `head` (elements of one)
    is hidden / heads, `positions` (tokens of the longest sequence) is `POSITIONS`. With experts
    `ffn` is the inner size of one.

    Raises:
        ValueError: no such family or key, one that is missing or there twice, no number, a size
            that no model has, or sizes that do not fit each other; a sentence.
    """
    if family not in FAMILIES:
        raise ValueError(
            f"sizes are given to a family ({', '.join(FAMILIES)}), not to {family[:40]!r}."
        )
    has_experts = family in WITH_EXPERTS
    needed = _NEEDED | (_OF_EXPERTS if has_experts else {})
    sizes = _sizes(family, text, needed | _OPTIONAL)
    if missing := [key for key in needed if key not in sizes]:
        raise ValueError(f"{', '.join(missing)} missing; such as {family}:{EXAMPLE}.")
    heads, hidden = sizes["heads"], sizes["hidden"]
    groups = sizes.setdefault("groups", heads)
    if heads % groups:
        raise ValueError(f"heads={heads} must be a multiple of groups={groups}.")
    if "head" not in sizes and hidden % heads:
        raise ValueError(f"hidden={hidden} must be a multiple of heads={heads}, or give head=SIZE.")
    if (head := sizes.setdefault("head", hidden // heads)) % 2:
        raise ValueError(f"head={head} (else hidden / heads) must be even: rope turns pairs.")
    if has_experts and sizes["topk"] > sizes["experts"]:
        raise ValueError(f"topk={sizes['topk']} is more than experts={sizes['experts']}.")
    sizes.setdefault("positions", POSITIONS)
    fields: dict[str, Any] = {name: sizes[key] for key, name in (needed | _OPTIONAL).items()}
    if has_experts:
        fields["moe_ffn_hidden_size"] = sizes["ffn"]
    return ModelArchitecture(family, **fields, **FAMILIES[family])


def _sizes(family: str, text: str, known: dict[str, str]) -> dict[str, int]:
    """Each key's size, by itself right."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        key, equals, number = item.partition("=")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"{family} has {', '.join(known)}."
            raise ValueError(f"unknown size {key[:40]!r}; {hint}")
        if key in sizes:
            raise ValueError(f"{key} is there twice.")
        value = None
        if number.isascii() and number.isdecimal():
            value = int(number) if len(number) <= MOST_DIGITS else 10**MOST_DIGITS
        if (problem := size_problem(known[key], value)) or value is None:
            raise ValueError(f"{key}{equals}{number[:40]} {problem}.")
        sizes[key] = value
    return sizes
