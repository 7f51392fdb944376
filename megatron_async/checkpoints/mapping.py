"""The names of a model's weights, in every format: one two-way table, made layer by layer.

| format | names |
| --- | --- |
| model | parameters of our `HybridModel`: layer i is character i of the pattern |
| Hugging Face | the family's (`checkpoints/family_names.py`), also its layers; so GGUF's |
| Megatron checkpoint | as the model, but a norm bears the name of the linear layer after it |
| Megatron checkpoint of a `GPTModel` | the family's layers, or all stacked in one tensor |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_async.checkpoints.family_names import names_of
from megatron_async.checkpoints.layer_weights import WEIGHTS_OF, Layer
from megatron_async.checkpoints.mtp_names import mtp_names_of
from megatron_async.checkpoints.weight import Region, Shape, Shard, Weight
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.pipeline import EMBEDDING, OUTPUT

__all__ = ["Region", "Shape", "Shard", "Weight", "mtp_weights", "weights"]


def weights(
    architecture: ModelArchitecture,
    shard: Shard | None = None,
    stacked_experts: bool = False,
    stacked_mtp: bool = False,
) -> Iterator[Weight]:
    """Every parameter of a rank's `HybridModel`, in the order of the model; those of multi-token
    prediction where the rank holds them.

    Where embedding and output layer are tied, the last of several pipeline stages has a copy of the
    embedding in its output layer.

    Args:
        architecture: of the whole model.
        shard: what this rank holds; None: all.
        stacked_experts: Hugging Face's names are those of transformers' modules, where a tensor
            holds all experts, instead of those of published files, where it often holds one's.
        stacked_mtp: the same of the layers of multi-token prediction.
    """
    shard = shard or Shard()
    for weight in _whole_weights(architecture, stacked_experts):
        name = shard.local_name(weight.name)
        if name is not None:
            yield replace(weight, name=name, shard=shard)
    stage = shard.stage
    if stage is not None and stage.is_last and architecture.tie_word_embeddings:
        embedding = next(_whole_weights(architecture, stacked_experts))
        yield replace(embedding, name=OUTPUT, shard=shard)
    if shard.with_mtp:
        for weight in mtp_weights(architecture, stacked_mtp):
            yield replace(weight, shard=shard)


def _whole_weights(a: ModelArchitecture, stacked: bool) -> Iterator[Weight]:
    names = names_of(a.model_type, stacked, a.activation == "silu")

    def plain(name: str, huggingface: str, shape: Shape, dim: int | None) -> Weight:
        return Weight(name, {huggingface: shape}, 1, name, dim)

    embedding = (a.vocab_size, a.hidden_size)
    yield plain(EMBEDDING, names.embedding, embedding, 0)
    for number, kind in enumerate(a.pattern):
        block = number // a.layers_per_block
        layer = Layer(a, names, f"decoder.layers.{number}.", names.layer.format(block))
        yield from WEIGHTS_OF[kind](layer)
    yield plain("decoder.final_norm.weight", names.final_norm, (a.hidden_size,), None)
    if not a.tie_word_embeddings:
        yield plain(OUTPUT, names.output, embedding, 0)


def mtp_weights(a: ModelArchitecture, stacked: bool = False) -> Iterator[Weight]:
    """Every parameter of all depths of multi-token prediction, for one rank.

    Args:
        a: of the model.
        stacked: Hugging Face's names are those where a tensor holds all experts.
    """
    names, mtp = names_of(a.model_type, stacked, a.activation == "silu"), mtp_names_of(a.model_type)
    hidden, layers = a.hidden_size, len(a.mtp_pattern)
    for depth in range(a.mtp_num_depths):
        first = depth * layers
        numbers = {"depth": depth, "first": first, "last": first + layers - 1}
        ours = f"mtp.layers.{depth}."
        whole = Layer(a, names, ours, "")
        for norm in ("enorm", "hnorm", "final_layernorm"):
            theirs: str = getattr(mtp, norm)
            yield whole.weight(f"{norm}.weight", {theirs.format(**numbers): (hidden,)})
        joint: dict[str, Shape] = {mtp.eh_proj.format(**numbers): (hidden, 2 * hidden)}
        eh_proj = whole.weight("eh_proj.weight", joint, 0)
        yield replace(eh_proj, has_swapped_halves=mtp.is_hidden_first)
        for number, kind in enumerate(a.mtp_pattern):
            inside = f"{ours}mtp_model_layer.layers.{number}."
            theirs = mtp.inside.format(layer=first + number, **numbers)
            yield from WEIGHTS_OF[kind](Layer(a, names, inside, theirs))
