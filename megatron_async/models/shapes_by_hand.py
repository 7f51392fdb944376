"""Shapes that a name spells out: `llama:layers=40,hidden=5120,heads=32,groups=8,ffn=14336,...`."""

from __future__ import annotations

import difflib
from typing import Any

from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.largest_sizes import size_problem

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
    """The architecture of a family with the sizes that a text gives.

    `groups` (KV heads) are as many as `heads` where the text does not say, `head` (elements of one)
    is hidden / heads, `positions` (tokens of the longest sequence) is `POSITIONS`. With experts
    `ffn` is the inner size of one.

    Args:
        family: one of `FAMILIES`.
        text: `KEY=SIZE,KEY=SIZE,...`, each key once.

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
