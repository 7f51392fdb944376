"""Largest sizes of a model that are read from a file.

Patterns, lists of tensors and shapes are made from these numbers before a weight is read, so a
number that no model has would take all memory or hours. Each limit is at least ten times what
published models have.
"""

from __future__ import annotations

from collections.abc import Mapping

LARGEST_LAYERS = 4096
LARGEST_EXPERTS = 1 << 14
LARGEST_EXPERT_WEIGHTS = 1 << 20
"""Experts of all layers together: each has a name or more."""
LARGEST_DEPTHS = 64
LARGEST_HIDDEN = 1 << 20
LARGEST_HEADS = 1 << 16
LARGEST_VOCABULARY = 1 << 24
LARGEST_OTHER = 2**31 - 1
"""Of every other size: what fits 32 bits."""

_EACH: Mapping[int, tuple[str, ...]] = {
    LARGEST_LAYERS: ("num_layers", "num_hidden_layers", "block_count"),
    LARGEST_EXPERTS: (
        "num_experts",
        "num_local_experts",
        "num_moe_experts",
        "n_routed_experts",
        "expert_count",
    ),
    LARGEST_DEPTHS: (
        "mtp_num_depths",
        "mtp_num_layers",
        "mtp_num_hidden_layers",
        "num_nextn_predict_layers",
    ),
    LARGEST_HIDDEN: ("hidden_size", "embedding_length"),
    LARGEST_HEADS: (
        "num_attention_heads",
        "num_key_value_heads",
        "num_query_groups",
        "num_heads",
        "head_count",
        "head_count_kv",
        "head_dim",
        "key_length",
        "kv_channels",
        "mamba_num_heads",
        "mamba_n_heads",
        "mamba_num_groups",
        "n_groups",
        "linear_num_key_heads",
        "linear_num_value_heads",
    ),
    LARGEST_VOCABULARY: ("vocab_size",),
}
_LARGEST = {name: limit for limit, names in _EACH.items() for name in names}


def size_problem(name: str, value: object) -> str:
    """What is wrong with a size: what it must be, or "" where nothing is.

    Args:
        name: of the setting, in `config.json`, GGUF metadata (with the architecture's prefix),
            Megatron's arguments or `ModelArchitecture`.
        value: as it was read.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return "must be a positive integer"
    limit = _LARGEST.get(name.rpartition(".")[2], LARGEST_OTHER)
    return "" if value <= limit else f"is more than any model has (at most {limit})"
