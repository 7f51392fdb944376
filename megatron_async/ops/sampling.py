"""Choose the next token of every row from its logits; every row has its own parameters.

Sampling is Gumbel-max: the argmax of (filtered logits + Gumbel noise) is a sample of the softmax
(Gumbel 1954; Maddison et al. 2014). With stateless noise (`ops/philox.py`) a row's token depends on
its logits, seed and position alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from megatron_async.ops.philox import gumbel_noise


class SamplingMode(IntEnum):
    """How much work a batch needs: the highest mode of its rows. Modes agree on what lower ones do,
    so a row's token does not depend on its company."""

    GREEDY = 0
    SOFTMAX = 1
    """Temperature only."""
    FILTERED = 2
    """top_k, top_p or min_p too: needs the score below which each row's tokens
    are dropped."""
    PROCESSED = 3
    """Penalties, bias, bans or log probs too: what `RowFeature`s ask for."""


@dataclass
class SamplingTensors:
    """Per-row parameters, all `[rows]` on the device of the logits.

    Attributes:
        temperature: float32; 0 is greedy.
        top_k: int32; 0 is off, 1 is greedy.
        top_p: float32; 0 is off.
        min_p: float32; 0 is off.
        seeds: int64, not negative.
        positions: int32: position of the token to be sampled.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


def sample_reference(logits: Tensor, params: SamplingTensors | None, mode: SamplingMode) -> Tensor:
    """Sample one token a row.

    Args:
        logits: `[rows, vocabulary]`, any float dtype.
        params: per-row parameters; None only for `GREEDY`.
        mode: the highest mode among the rows.

    Returns:
        int64 `[rows]` token ids.
    """
    greedy = logits.argmax(dim=-1)
    if mode == SamplingMode.GREEDY or params is None:
        return greedy
    # A greedy row divides by 1 here and takes the argmax below.
    temperature = torch.where(params.temperature > 0, params.temperature, 1.0)
    scaled = logits.to(torch.float32) / temperature[:, None]
    if mode >= SamplingMode.FILTERED:
        scaled = filter_logits(scaled, params)
    noise = gumbel_noise(params.seeds, params.positions, logits.size(-1))
    sampled = (scaled + noise).argmax(dim=-1)
    is_greedy = (params.temperature == 0) | (params.top_k == 1)
    return torch.where(is_greedy, greedy, sampled)


def sample_with_cuts_reference(
    logits: Tensor, params: SamplingTensors | None, mode: SamplingMode
) -> tuple[Tensor, None]:
    """`sample_reference`, in the form of `triton_sampling.sample_with_cuts`."""
    return sample_reference(logits, params, mode), None


def best_tokens_reference(
    logits: Tensor, params: SamplingTensors | None, mode: SamplingMode, first: int, columns: int
) -> tuple[Tensor, Tensor]:
    """The best token of every row among a tensor-parallel rank's, and its score.

    Args:
        logits: `[rows, local columns]`, any float dtype.
        params: as for `sample_reference`.
        mode: `GREEDY` or `SOFTMAX`.
        first: token id of the first column.
        columns: how many of the columns are tokens, the others being padding.

    Returns:
        float32 `[rows, 1]`, what `sample_reference` takes the largest of, and int32 `[rows, 1]`
        token ids.
    """
    scores = logits.to(torch.float32)
    if mode != SamplingMode.GREEDY and params is not None:
        is_greedy = (params.temperature == 0) | (params.top_k == 1)
        temperature = torch.where(is_greedy, 1.0, params.temperature)
        noise = gumbel_noise(params.seeds, params.positions, logits.size(-1), first)
        scores = torch.where(is_greedy[:, None], scores, scores / temperature[:, None] + noise)
    padding = torch.arange(logits.size(-1), device=logits.device) >= columns
    best, index = scores.masked_fill(padding, -torch.inf).max(dim=-1, keepdim=True)
    return best, (first + index).to(torch.int32)


def filter_logits(scaled: Tensor, params: SamplingTensors) -> Tensor:
    """Set what top_k, top_p and min_p exclude to minus infinity.

    top_p counts the probabilities left by top_k, renormalised, and keeps the token that crosses the
    threshold; the likeliest token always stays. Equal logits rank by token id.

    Args:
        scaled: float32 `[rows, vocabulary]`, divided by temperature.
        params: per-row parameters.

    Returns:
        float32 `[rows, vocabulary]`.
    """
    ranked, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.size(-1), device=scaled.device)[None, :]
    top_k = params.top_k[:, None]
    drop = (top_k > 0) & (rank >= top_k)
    probability = torch.softmax(ranked.masked_fill(drop, -torch.inf), dim=-1)
    top_p = params.top_p[:, None]
    before = probability.cumsum(dim=-1) - probability
    drop |= (top_p > 0) & (before >= top_p)
    drop |= probability < params.min_p[:, None] * probability[:, :1]
    drop[:, 0] = False
    return torch.empty_like(scaled).scatter_(-1, order, ranked.masked_fill(drop, -torch.inf))
