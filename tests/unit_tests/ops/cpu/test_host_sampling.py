"""A CPU's loops choose the tokens of the references."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_async.ops.cpu.compiler import compiles
from megatron_async.ops.sampling.cpu import host_sampling
from megatron_async.ops.sampling.philox import gumbel_noise
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows, best_tokens, sample
from tests.unit_tests.ops.sampling.cases import rows_asking

pytestmark = pytest.mark.skipif(not compiles(), reason="Numba is not here, or switched off")
RELEVANT = 1e-4
"""Scores, and shares of probability, that differ by more are not a matter of rounding."""


def random_logits(rng: np.random.Generator, count: int, vocabulary: int) -> Tensor:
    """Flat, peaked, with ties, and with tokens that are banned."""
    logits = torch.from_numpy(rng.normal(size=(count, vocabulary))).float()
    logits *= torch.from_numpy(rng.choice([0.0, 0.01, 1.0, 4.0, 30.0], count))[:, None].float()
    rounded = torch.from_numpy(rng.random(count) < 0.3)
    logits[rounded] = logits[rounded].round()
    banned = torch.from_numpy(rng.random((count, vocabulary)) < 0.2)
    banned &= torch.from_numpy(rng.random(count) < 0.3)[:, None]
    return logits.masked_fill(banned, -torch.inf)


def random_rows(rng: np.random.Generator, count: int, vocabulary: int) -> SamplingRows:
    return rows_asking(
        count,
        seeds=rng.integers(0, 2**63 - 1, count),
        positions=rng.integers(0, 5000, count),
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7], count),
        top_k=rng.choice([0, 0, 1, 2, 7, vocabulary, 3 * vocabulary], count),
        top_p=rng.choice([0.0, 0.0, 0.05, 0.6, 0.95, 0.999], count),
        min_p=rng.choice([0.0, 0.0, 0.02, 1.0], count),
    )


def test_the_first_of_equal_scores_is_the_token() -> None:
    """Scores so large that noise is rounded to one of a few numbers."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(2.0**24 + 2 * rng.integers(0, 6, (60, 700))).float()
    rows = rows_asking(60, seeds=range(60), positions=range(60), temperature=1.0)
    scores = logits + rows.noise(700)
    assert ((scores == scores.amax(1, keepdim=True)).sum(1) > 1).sum() > 10
    found = host_sampling.sample_cpu(logits, rows, SamplingMode.SOFTMAX)[0]
    assert torch.equal(found, sample.reference(logits, rows, SamplingMode.SOFTMAX)[0])


def test_noise_is_that_of_the_reference() -> None:
    """All of it: the largest of one score and minus infinity elsewhere."""
    for first in (0, 1, 2, 3, 50_001):
        rows = rows_asking(1, seeds=[2**62 + 12345], positions=[77], temperature=1.0)
        noise = gumbel_noise(torch.tensor([2**62 + 12345]), torch.tensor([77]), 100, first)[0]
        for token in range(100):
            logits = torch.full((1, 100), -torch.inf)
            logits[0, token] = 2.5
            score, found = host_sampling.best_tokens_cpu(
                logits, rows, SamplingMode.SOFTMAX, first, 100
            )
            assert int(found) == first + token
            torch.testing.assert_close(score[0, 0], 2.5 + noise[token], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", [SamplingMode.GREEDY, SamplingMode.SOFTMAX])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_of_a_vocabulary_are_the_whole(ranks: int, mode: SamplingMode) -> None:
    rng = np.random.default_rng(ranks)
    for _ in range(20):
        columns = int(rng.integers(1, 150))
        logits, rows = random_logits(rng, 6, ranks * columns), random_rows(rng, 6, columns)
        logits[0, int(rng.integers(ranks * columns))] = float(rng.choice([np.nan, np.inf]))
        size = ranks * columns - int(rng.integers(columns))
        scores, tokens, expected = [], [], []
        for rank in range(ranks):
            own = logits[:, rank * columns : (rank + 1) * columns]
            arguments = own, rows, mode, rank * columns, min(size - rank * columns, columns)
            score, token = host_sampling.best_tokens_cpu(*arguments)
            expected.append(best_tokens.reference(*arguments)[0])
            scores.append(score)
            tokens.append(token)
        torch.testing.assert_close(torch.cat(scores, 1), torch.cat(expected, 1))
        best, rank = torch.cat(scores, 1).max(1)
        token = torch.cat(tokens, 1).gather(1, rank[:, None])[:, 0].long()
        whole = host_sampling.sample_cpu(logits[:, :size], rows, mode)[0]
        is_sound = best.isfinite()
        assert torch.equal(torch.where(is_sound, token, -1), whole)


@pytest.mark.parametrize("mode", [SamplingMode.GREEDY, SamplingMode.SOFTMAX, SamplingMode.FILTERED])
def test_threads_share_rows(mode: SamplingMode, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    logits, rows = random_logits(rng, 7, 500), random_rows(rng, 7, 500)
    alone = host_sampling.sample_cpu(logits, rows, mode)[0]
    monkeypatch.setattr(host_sampling, "LEAST_SHARED", 0)
    monkeypatch.setattr(host_sampling, "LEAST_SHARED_GREEDY", 0)
    for threads in (1, 2, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=threads: number)
        assert torch.equal(host_sampling.sample_cpu(logits, rows, mode)[0], alone)


def test_a_slot_that_does_not_exist_is_an_error() -> None:
    rows = rows_asking(2, seeds=[1, 2], positions=[3, 4], temperature=1.0)
    for wrong in (-1, len(rows.records)):
        rows.slots[1] = wrong
        with pytest.raises(IndexError, match="a slot that does not exist"):
            host_sampling.sample_cpu(torch.zeros(2, 10), rows, SamplingMode.SOFTMAX)
