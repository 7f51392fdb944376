"""The share of the vocabulary for which a tensor-parallel rank computes logits.

With Gumbel-max and noise that depends only on seed, position and token, the best token of all is
the best of the ranks' best tokens. So a row that is greedy, or sampled from all tokens, needs eight
bytes from each rank: the best score and its token. Rows with filters, penalties, log probs or
grammars need all logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.ops.ranks.symmetric_choice import choose_among_ranks
from megatron_async.ops.ranks.tensor_collectives import TensorCollectives
from megatron_async.ops.sampling.slot_records import NO_TOKEN


@dataclass(frozen=True)
class VocabularyShard:
    """Which columns of the logits a rank has.

    Attributes:
        vocab_size: tokens of all ranks.
        first: token of this rank's first column.
        columns: how many of its columns are tokens; the later ones are padding. May be 0.
        collectives: of the ranks that share the vocabulary.
    """

    vocab_size: int
    first: int
    columns: int
    collectives: TensorCollectives

    def gather(self, logits: Tensor) -> Tensor:
        """Join the ranks' logits `[..., local columns]` to `[..., vocabulary]`, contiguous.

        A column is computed by one rank and copied to the others, so all have the same bits.
        """
        return self.collectives.all_gather_columns(logits, self.vocab_size)

    def choose(self, scores: Tensor, ids: Tensor) -> Tensor:
        """`choose_among_ranks`, however the ranks are linked; scores are infinity where a logit is
        NaN."""
        choice = self.collectives.choice
        if choice is not None and len(scores) <= choice.places:
            self.collectives.calls["choice"] += 1
            return choose_among_ranks(scores, ids, choice)
        self.collectives.calls["choice by all-gather"] += 1
        return self._choose_gathered(scores, ids)

    def _choose_gathered(self, scores: Tensor, ids: Tensor) -> Tensor:
        best = scores.argmax(1, keepdim=True)
        pair = scores.gather(1, best).view(torch.int32), ids.gather(1, best)
        pairs = self.collectives.all_gather(torch.cat(pair, 1)[None])
        # argmax takes the first of equal ones: the rank with the lowest tokens.
        winner = pairs[..., 0].contiguous().view(torch.float32).argmax(0, keepdim=True)
        score = pairs[..., 0].contiguous().view(torch.float32).gather(0, winner)[0]
        tokens = pairs[..., 1].gather(0, winner)[0].long()
        return tokens.where(score.isfinite(), NO_TOKEN)
