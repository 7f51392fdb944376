"""Tensor-parallel ranks choose the tokens that one rank chooses, each from its own columns."""

import pytest
import torch

from megatron_async.models.partition import padded_vocab_size
from megatron_async.ops.ranks.symmetric_choice import choose_among_ranks
from megatron_async.ops.ranks.symmetric_memory import Meeting
from megatron_async.ops.sampling import triton_sampling
from megatron_async.ops.sampling.sampling import SamplingMode, best_tokens, sample
from tests.unit_tests.ops.sampling.test_triton_sampling import parameters
from tests.unit_tests.ops.stopped_ranks import run_stopped_ranks

pytestmark = pytest.mark.usefixtures("poisoned_memory")

MODES = (SamplingMode.GREEDY, SamplingMode.SOFTMAX)
PLACES, SPLITS = 3, 5
CALLS = (1, 3, 2, 3) * 3
"""Rows of successive calls: they take their turns at different times."""


def batch(vocab, device):
    """Rows with ties within and across ranks, and without any finite logit."""
    torch.manual_seed(0)
    logits = torch.randn(8, vocab, device=device).half()
    logits[:3] = logits[:3].round()
    logits[3] = 1.0
    logits[4] = -torch.inf
    logits[5, : vocab - 1] = -torch.inf
    heats = [0.0, 1.0, 0.3, 0.0, 0.9, 0.0, 5.0, 1e-3]
    return logits, parameters(8, device, temperature=heats, top_k=[0] * 6 + [1, 0])


def shards(logits, ranks):
    """What each rank's output layer gives, its first token and how many it has; its padding would
    win if it were looked at."""
    vocab = logits.size(1)
    padded = padded_vocab_size(vocab, ranks)
    whole = logits.new_full((len(logits), padded), 1e4)
    whole[:, :vocab] = logits
    for rank, columns in enumerate(whole.chunk(ranks, dim=1)):
        first = rank * columns.size(1)
        yield columns.contiguous(), first, min(max(vocab - first, 0), columns.size(1))


def joined(best):
    """The first of the best among all ranks' (scores, ids); -1 where it is not finite."""
    scores, ids = (torch.cat(part, dim=1) for part in zip(*best, strict=True))
    top, place = scores.max(1, keepdim=True)
    return ids.gather(1, place).where(top.isfinite(), -1)[:, 0].long()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("vocab", "ranks"), [(131, 2), (131, 3), (5, 4), (7, 1)])
def test_reference_finds_what_one_rank_finds(vocab, ranks, mode):
    logits, params = batch(vocab, "cpu")
    best = [best_tokens.reference(own, params, mode, *at) for own, *at in shards(logits, ranks)]
    assert all(scores.shape == ids.shape == (8, 1) for scores, ids in best)
    assert torch.equal(joined(best), sample.reference(logits, params, mode)[0])


def damaged_batch(vocab, device):
    """`batch` with a NaN or infinity in the middle of some rows."""
    logits, params = batch(vocab, device)
    logits[0:2, vocab // 2] = torch.nan
    logits[2:4, vocab // 2] = torch.inf
    logits[6, :] = torch.nan
    return logits, params


def test_reference_finds_nan_as_one_rank_does():
    logits, params = damaged_batch(131, "cpu")
    for mode in MODES:
        best = [best_tokens.reference(own, params, mode, *at) for own, *at in shards(logits, 2)]
        found = joined(best)
        assert torch.equal(found, sample.reference(logits, params, mode)[0])
        assert (found == -1).tolist() == [True] * 5 + [False, True, False]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("vocab", "ranks"), [(1301, 2), (1301, 3), (5, 4), (1024, 2)])
def test_kernel_finds_what_one_rank_finds(vocab, ranks, mode, device, monkeypatch):
    monkeypatch.setattr(triton_sampling, "TILE", 512)
    logits, params = batch(vocab, device)
    best = [
        triton_sampling.best_tokens_gpu(own, params, mode, *at)
        for own, *at in shards(logits, ranks)
    ]
    assert torch.equal(joined(best), triton_sampling.sample_gpu(logits, params, mode)[0])
    for (own, *at), (scores, _) in zip(shards(logits, ranks), best, strict=True):
        expected, _ = best_tokens.reference(own, params, mode, *at)
        torch.testing.assert_close(scores.max(1, keepdim=True).values, expected)


def test_kernel_finds_nan_as_one_rank_does(device, monkeypatch):
    monkeypatch.setattr(triton_sampling, "TILE", 512)
    logits, params = damaged_batch(1301, device)
    for mode in MODES:
        best = [
            triton_sampling.best_tokens_gpu(own, params, mode, *at)
            for own, *at in shards(logits, 3)
        ]
        assert not any(scores.isnan().any() for scores, _ in best)
        assert torch.equal(joined(best), triton_sampling.sample_gpu(logits, params, mode)[0])
        assert (joined(best) == -1).tolist() == [True] * 5 + [False, True, False]
    with pytest.raises(ValueError, match="rows must be adjacent"):
        triton_sampling.best_tokens_gpu(logits.t(), None, SamplingMode.GREEDY, 0, 2)


# ---- The exchange of scores and tokens -------------------------------------------------------


def candidates(rank, call):
    """A rank's best scores and their tokens; scores are few, so that many are equal, and some rows
    have none."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    scores = torch.randint(-3, 3, (CALLS[call], SPLITS), generator=generator).float()
    scores[scores < -1] = -torch.inf
    ids = torch.arange(SPLITS, dtype=torch.int32) * 6 + SPLITS * 6 * rank
    return scores, ids.repeat(CALLS[call], 1)


def run_rank(rank, ranks, memory, results):
    torch.set_num_threads(1)
    pointers = torch.tensor([part.data_ptr() for part in memory])
    meeting = Meeting(pointers, torch.zeros(PLACES).int(), rank, first_word(ranks))
    for call in range(len(CALLS)):
        scores, ids = candidates(rank, call)
        if call == len(CALLS) - 1 and rank == 1:  # one rank's logits are damaged
            scores[0, 3], scores[1, 0] = torch.nan, torch.inf
        tokens = choose_among_ranks(scores, ids, meeting)
        results[rank][call, : len(tokens)] = tokens


def first_word(ranks):
    return -(-PLACES * ranks // 2)


@pytest.mark.usefixtures("interpreter")  # GPUs are tested in test_gpu_ranks.py
def test_ranks_choose_together():
    ranks = 3
    words = first_word(ranks) + 2 * PLACES
    memory = [torch.zeros(words, dtype=torch.int64).share_memory_() for _ in range(ranks)]
    results = torch.full((ranks, len(CALLS), PLACES), -1).share_memory_()
    run_stopped_ranks(ranks, run_rank, ranks, memory, results)
    assert (results == results[0]).all()
    for call, rows in enumerate(CALLS):
        expected = joined([candidates(rank, call) for rank in range(ranks)])
        if call == len(CALLS) - 1:
            expected[:2] = -1
        assert torch.equal(results[0, call, :rows], expected), call


def test_choice_refuses_what_does_not_fit():
    scores, ids = torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int32)
    meeting = Meeting(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 0, 0)
    with pytest.raises(ValueError, match="at most 1 rows; found 2"):
        choose_among_ranks(scores, ids, meeting)
    with pytest.raises(ValueError, match="of one shape"):
        choose_among_ranks(scores[:1], ids, meeting)
