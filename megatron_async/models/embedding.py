"""Embedding and output layer: both hold this rank's rows of the vocabulary.

`HybridModel` builds both without the layer spec. Afterwards they get the classes of this file,
which have the same parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.linear import InferenceColumnParallelLinear
from megatron_async.ops.linear.cpu.grouped_weight import GroupedWeight
from megatron_async.ops.linear.products import CUBLAS, choose_for
from megatron_async.ops.ranks.tensor_collectives import TensorCollectives, collectives_of
from megatron_async.ops.ranks.vocabulary_shard import VocabularyShard


class InferenceEmbedding(LanguageModelEmbedding):
    """Megatron's `LanguageModelEmbedding` without position embeddings."""

    ops = LayerOps()
    packed_weight: GroupedWeight | None = None

    @property
    def collectives(self) -> TensorCollectives:
        """Collectives of the ranks that share the vocabulary."""
        return collectives_of(self.tp_group)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, tokentype_ids: Any = None
    ) -> Tensor:
        """Embeddings of a step's tokens, int64 `[1, tokens]`: `[tokens, 1, hidden]`; with sequence
        parallelism this rank's rows of them. Attention applies positions."""
        words, collectives = self.word_embeddings, self.collectives
        lookup = self.ops.vocab_embedding
        scale = self.config.mup_embedding_mult if self.config.use_mup else 1.0
        if self.packed_weight is not None:  # of one rank
            return self.packed_weight.rows(input_ids.flatten()).mul_(scale)[:, None]
        rows = lookup(input_ids.flatten(), words.weight, words.vocab_start_index, scale)[:, None]
        if collectives.size == 1:
            return rows
        if self.config.sequence_parallel:
            return collectives.reduce_scatter(rows)
        # It begins the residual stream, so it is kept beyond the next collective.
        return collectives.keep(collectives.all_reduce(rows))


class InferenceOutputLayer(InferenceColumnParallelLinear):
    """The output layer: logits of this rank's rows of the vocabulary (`vocab_size` tokens of all
    ranks), padding included.

    Whether ranks need the logits of others depends on the step's sampling. So the caller of the
    model gathers them (`VocabularyShard.gather`).
    """

    vocab_size: int

    @property
    def shard(self) -> VocabularyShard | None:
        """The columns of this rank; None if it has all columns."""
        if self.collectives.size == 1:
            return None
        columns = self.output_size_per_partition
        first = self.collectives.rank * columns
        existing = min(max(self.vocab_size - first, 0), columns)
        return VocabularyShard(self.vocab_size, first, existing, self.collectives)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits `[rows, 1, columns of this rank]` of hidden states `[rows, 1, hidden]`, and None.

        Megatron's models ask for gathered logits during inference; this argument is ignored.
        """
        return super().forward(input_, weight, runtime_gather_output=False)

    def scaled(self, rows: Tensor, weight: Tensor | None, scale: float) -> Tensor | None:
        """The logits, `[rows, columns of this rank]`, times `scale` before they are rounded, where
        the product's own kernel can do that; else None.

        Args:
            rows: hidden states `[rows, hidden]`.
            weight: `[columns of this rank, hidden]`; None: the layer's.
            scale: by which logits are multiplied.
        """
        weight = self.weight if weight is None else weight
        is_cublas = rows.is_cuda and choose_for(rows, weight).kernel is CUBLAS
        if not is_cublas or self.bias is not None or self.ops.is_invariant:
            return None
        # The first argument is not read: beta is 0.
        return torch.addmm(rows.new_empty(1), rows, weight.t(), beta=0, alpha=scale)


def shard_vocabulary(model: HybridModel, vocab_size: int) -> None:
    """Give a model, with as many rows of embedding as the padded vocabulary has, the classes of
    this file; its `vocab_size` is the tokenizer's from now on."""
    model.vocab_size = vocab_size
    if hasattr(model, "embedding"):
        model.embedding.__class__ = InferenceEmbedding
    if hasattr(model, "output_layer"):
        model.output_layer.__class__ = InferenceOutputLayer
        model.output_layer.vocab_size = vocab_size
        # The stack gathers all rows, because the last row of a chunk may be on any rank.
        model.output_layer.sequence_parallel = False
