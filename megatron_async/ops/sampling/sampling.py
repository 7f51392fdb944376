"""Choose the next token of every row from its logits; every row has its own parameters.

Sampling is Gumbel-max: the argmax of (filtered logits + Gumbel noise) is a sample of the softmax
(Gumbel 1954; Maddison et al. 2014). With stateless noise (`ops/sampling/philox.py`) a row's token
depends only on its logits, seed and position.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.ops.op import op
from megatron_async.ops.sampling.philox import MASK, gumbel_noise
from megatron_async.ops.sampling.slot_records import FLOAT_WORDS, NO_TOKEN, Header


class SamplingMode(IntEnum):
    """The work that a batch needs: the highest mode of its rows. A higher mode gives the same
    tokens to rows of a lower mode, so a row's token does not depend on the other rows."""

    GREEDY = 0
    SOFTMAX = 1
    """Temperature only."""
    FILTERED = 2
    """top_k, top_p or min_p too: needs the score below which each row's tokens
    are dropped."""
    PROCESSED = 3
    """Penalties, bias, bans or log probs too: what `RowFeature`s ask for."""


@dataclass
class SamplingRows:
    """Rows to be sampled, on the device of the logits; their parameters are in their records.

    Attributes:
        slots: int64 `[rows]`.
        positions: int32 `[rows]`: position of the token to be sampled.
        records: int32 `[slots + 1, RECORD_WORDS]`.
    """

    slots: Tensor
    positions: Tensor
    records: Tensor

    def numbers(self, word: Header) -> Tensor:
        """A word of each row's header, float32 or int32 `[rows]`."""
        words = self.records[:, word].index_select(0, self.slots)
        return words.view(torch.float32) if word in FLOAT_WORDS else words

    def heats(self) -> Tensor:
        """The temperature at which each row is sampled, float32 `[rows]`; 0 for greedy rows."""
        return self.numbers(Header.TEMPERATURE).masked_fill(self.numbers(Header.TOP_K) == 1, 0)

    def noise(self, vocab_size: int, first: int = 0) -> Tensor:
        """Gumbel noise of the rows; see `gumbel_noise`."""
        low, high = self.numbers(Header.SEED_LOW).long(), self.numbers(Header.SEED_HIGH).long()
        return gumbel_noise((high << 32) | (low & MASK), self.positions, vocab_size, first)

    def one(self, row: int) -> SamplingRows:
        """A row by itself."""
        part = slice(row, row + 1)
        return SamplingRows(self.slots[part], self.positions[part], self.records)


class FilterCuts(NamedTuple):
    """Limits of the filters of a batch.

    Attributes:
        cut, last: float32 and int32 `[rows]`: top_k and top_p keep the tokens with a logit over
            `cut`, and those with exactly `cut` up to token id `last`.
        top: float32 `[rows]`: the largest logit.
    """

    cut: Tensor
    last: Tensor
    top: Tensor


@op(gpu="sampling.triton_sampling", cpu="sampling.cpu.host_sampling")
def sample(
    logits: Tensor, rows: SamplingRows | None, mode: SamplingMode
) -> tuple[Tensor, FilterCuts | None]:
    """Sample one token a row, where its logits leave one.

    A row has no token if one of its logits is NaN or plus infinity (the model is broken then), or
    if all are minus infinity. The sample of such a row is -1 in every mode.

    Args:
        logits: `[rows, vocabulary]`, any float dtype.
        rows: what the rows ask for; None only for `GREEDY`.
        mode: the highest mode among the rows.

    Returns:
        int64 `[rows]` token ids; and where the filters cut, None where the mode has none, or where
        the log probs of the device find that anew.
    """
    is_sound = logits.amax(dim=-1).isfinite()  # NaN is taken for the largest
    greedy = logits.argmax(dim=-1).where(is_sound, NO_TOKEN)
    if mode == SamplingMode.GREEDY or rows is None:
        return greedy, None
    heats = rows.heats()
    # A greedy row divides by 1 here and takes the argmax below.
    scaled = logits.to(torch.float32) / torch.where(heats > 0, heats, 1.0)[:, None]
    if mode >= SamplingMode.FILTERED:
        scaled = filter_logits(scaled, rows)
    sampled = (scaled + rows.noise(logits.size(-1))).argmax(dim=-1)
    return torch.where((heats > 0) & is_sound, sampled, greedy), None


@op(gpu="sampling.triton_sampling", cpu="sampling.cpu.host_sampling")
def best_tokens(
    logits: Tensor, rows: SamplingRows | None, mode: SamplingMode, first: int, columns: int
) -> tuple[Tensor, Tensor]:
    """The best token of every row among a tensor-parallel rank's, and its score.

    Args:
        logits: `[rows, local columns]`, any float dtype.
        rows: as for `sample`.
        mode: `GREEDY` or `SOFTMAX`.
        first: token id of the first column.
        columns: how many of the columns are tokens, the others being padding.

    Returns:
        float32 `[rows, 1]`, what `sample` takes the largest of, infinity for NaN; and int32
        `[rows, 1]` token ids. An implementation may give several, the best of each part of a row.
    """
    scores = logits.to(torch.float32)
    if mode != SamplingMode.GREEDY and rows is not None:
        heats = rows.heats()[:, None]
        noisy = scores / torch.where(heats > 0, heats, 1.0) + rows.noise(logits.size(-1), first)
        scores = torch.where(heats > 0, noisy, scores)
    padding = torch.arange(logits.size(-1), device=logits.device) >= columns
    scores = scores.masked_fill(scores.isnan(), torch.inf).masked_fill(padding, -torch.inf)
    best, index = scores.max(dim=-1, keepdim=True)
    return best, (first + index).to(torch.int32)


def filter_logits(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """Set logits `[rows, vocabulary]`, float32 and divided by temperature, of tokens that top_k,
    top_p and min_p exclude to minus infinity.

    top_p counts the probabilities left by top_k, renormalised, and keeps the token that crosses the
    threshold; the likeliest token always stays. Equal logits rank by token id.
    """
    ranked, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.size(-1), device=scaled.device)[None, :]
    top_k = rows.numbers(Header.TOP_K)[:, None]
    drop = (top_k > 0) & (rank >= top_k)
    probability = torch.softmax(ranked.masked_fill(drop, -torch.inf), dim=-1)
    top_p = rows.numbers(Header.TOP_P)[:, None]
    before = probability.cumsum(dim=-1) - probability
    drop |= (top_p > 0) & (before >= top_p)
    drop |= probability < rows.numbers(Header.MIN_P)[:, None] * probability[:, :1]
    drop[:, 0] = False
    return torch.empty_like(scaled).scatter_(-1, order, ranked.masked_fill(drop, -torch.inf))
