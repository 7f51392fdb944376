"""The part of a model that one tensor-parallel rank holds, and which models can be split.

Attention is split by KV heads (each with its query heads), the MLP by its hidden units, embedding
and output layer by rows of the vocabulary (Shoeybi et al. 2019, Megatron-LM). Only the vocabulary
is padded to a multiple of the ranks; all other sizes must be multiples.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import (
    ATTENTION,
    EXPERTS,
    MLP,
    RECURRENT,
    ModelArchitecture,
    has_window,
)
from megatron_async.models.pipeline import stage_of
from megatron_async.models.sizes import SIZES_OF, RecurrentSizes

if TYPE_CHECKING:
    from megatron_async.models.parallel_state import ParallelSizes


def padded_vocab_size(vocab_size: int, ranks: int) -> int:
    """Rows of the embedding over all ranks: the vocabulary, rounded up to a multiple of them."""
    return -(-vocab_size // ranks) * ranks


def part_of_rank(
    architecture: ModelArchitecture, sizes: ParallelSizes, transformer_impl: str = "local"
) -> ModelArchitecture:
    """A model on one rank whose kernels are those of each tensor-parallel rank of this one, but for
    sums over ranks and what goes with them. Experts are all there, as the router's product has
    them; so are all layers.

    Raises:
        ConfigurationError: as `check_partition`.
    """
    check_partition(architecture, sizes, transformer_impl)
    ranks, a = sizes.tensor_model_parallel, architecture
    if ranks == 1:
        return a
    names = ["num_attention_heads", "num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size"]
    names += ["moe_shared_expert_intermediate_size"]
    divided = {name: getattr(a, name) // ranks for name in names}
    for kind in RECURRENT:
        if kind in a.pattern:
            own = SIZES_OF[kind].of(a).of_rank(ranks)
            divided |= dict(zip(own.FIELDS, vars(own).values()))
    vocab_size = padded_vocab_size(a.vocab_size, ranks) // ranks
    return replace(a, **divided, vocab_size=vocab_size)


def local_heads(model: Any) -> tuple[int, int]:
    """Query heads and KV heads of one rank, by Megatron's `TransformerConfig`."""
    ranks = model.tensor_model_parallel_size
    return model.num_attention_heads // ranks, model.num_query_groups // ranks


def recurrent_layers(model: Any) -> str:
    """Layers with a state for each request on this pipeline stage, in order: those marked `M` or
    `G` in a hybrid pattern."""
    return "".join(kind for kind in stage_of(model).pattern if kind in RECURRENT)


def recurrent_sizes(model: Any, kinds: str) -> list[RecurrentSizes]:
    """Sizes of recurrent layers (such as "MMG") on one tensor-parallel rank, by Megatron's
    `TransformerConfig`, or by a `ModelArchitecture`, which is on one rank."""
    ranks = getattr(model, "tensor_model_parallel_size", 1)
    return [SIZES_OF[kind].of(model).of_rank(ranks) for kind in kinds]


def routed_layers(model: Any) -> list[int]:
    """Layers with experts on each pipeline stage, without those of multi-token prediction, by
    Megatron's `TransformerConfig`."""
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if not model.num_moe_experts:
        return [0] * stage_of(model).count
    if pattern is not None:
        return [part.count(EXPERTS) for part in pattern.split("|")]
    spacing = model.moe_layer_freq
    if isinstance(spacing, int):
        return [len(range(0, model.num_layers, spacing))]
    return [sum(map(bool, spacing))]


def mtp_kv_layers(model: Any) -> int:
    """KV layers of multi-token prediction, after those of the model; 0 if it is not built."""
    depths: int = getattr(model, "mtp_num_depths", 0)
    return depths * str(getattr(model, "mtp_pattern", "")).count(ATTENTION)


def attention_numbers(model: Any) -> list[list[int]]:
    """Megatron's numbers, from 1, of the attention layers of each pipeline stage, without those of
    multi-token prediction, by Megatron's `TransformerConfig`."""
    pattern = getattr(model, "hybrid_layer_pattern", None)
    parts = [ATTENTION * model.num_layers] if pattern is None else pattern.split("|")
    number = itertools.count(1)
    return [[n for kind, n in zip(part, number) if kind == ATTENTION] for part in parts]


def layer_windows(model: Any) -> list[list[int]]:
    """The keys that a token sees in each KV layer of each pipeline stage, 0 for all, by Megatron's
    `TransformerConfig`. Layers of multi-token prediction, which come last, have no window.

    Raises:
        ConfigurationError: `window_attn_skip_freq` lists fewer layers than there are.
    """
    if windows := getattr(model, "windows", None):
        return list(windows)  # a shape's
    window = getattr(model, "window_size", None)
    skips = getattr(model, "window_attn_skip_freq", None)
    # Megatron counts the keys before a token's own.
    keys = 0 if window is None or window[0] < 0 else window[0] + 1
    layers = model.num_layers
    if keys and isinstance(skips, list) and len(skips) < layers:
        raise ConfigurationError(
            f"window_attn_skip_freq={skips} has {len(skips)} entries: give one for each of "
            f"{layers} layers."
        )
    stages = attention_numbers(model)
    found = [[keys * has_window(skips, n) for n in stage] for stage in stages]
    found[-1] += [0] * mtp_kv_layers(model)
    return found


def is_recurrent(model: Any) -> bool:
    """Whether any pipeline stage has layers with a state for each request. Scheduling depends on
    this, and must be the same on all stages."""
    pattern = getattr(model, "hybrid_layer_pattern", None) or ""
    return any(kind in pattern for kind in RECURRENT)


def check_partition(
    architecture: ModelArchitecture, sizes: ParallelSizes, transformer_impl: str
) -> None:
    """Check that a model can be split over so many ranks.

    Raises:
        ConfigurationError: a size is no multiple of the ranks; names it, and the sizes that fit.
    """
    ranks = sizes.tensor_model_parallel
    if sizes.sequence_parallel and transformer_impl != "local":
        raise ConfigurationError(
            f"sequence_parallel=True is not served with transformer_impl={transformer_impl!r}: use "
            "transformer_impl='local', or leave sequence_parallel out."
        )
    a = architecture
    counts: dict[str, int] = {}
    if ATTENTION in a.pattern:
        counts["key/value heads (num_query_groups)"] = a.num_query_groups
        counts["attention heads"] = a.num_attention_heads
    for kind in RECURRENT:
        if kind in a.pattern:
            counts |= SIZES_OF[kind].of(a).shared
    if MLP in a.pattern:
        counts["MLP units (ffn_hidden_size)"] = a.ffn_hidden_size
    if a.num_moe_experts:
        counts["units of an expert (moe_ffn_hidden_size)"] = a.moe_ffn_hidden_size
    if a.moe_shared_expert_intermediate_size:
        counts["units of the shared expert (moe_shared_expert_intermediate_size)"] = (
            a.moe_shared_expert_intermediate_size
        )
    _check_experts(a, sizes.expert_model_parallel)
    for what, count in counts.items():
        if count % ranks:
            fitting = [str(n) for n in range(1, min(counts.values()) + 1) if _fits(counts, n)]
            raise ConfigurationError(
                f"tensor_model_parallel_size={ranks} does not divide the model's {count} {what}: "
                f"use one of {', '.join(fitting)}. (Heads are never held twice.)"
            )


def _check_experts(a: ModelArchitecture, ranks: int) -> None:
    if ranks > 1 and not a.num_moe_experts:
        raise ConfigurationError(
            f"expert_model_parallel_size={ranks}, but this {a.model_type} model has no experts: "
            "leave it out."
        )
    if a.num_moe_experts % ranks:
        raise ConfigurationError(
            f"expert_model_parallel_size={ranks} does not divide the model's {a.num_moe_experts} "
            "experts (num_moe_experts): use a size that does."
        )


def _fits(counts: dict[str, int], ranks: int) -> bool:
    return all(count % ranks == 0 for count in counts.values())
