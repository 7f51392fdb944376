"""Tokens counted from blocks of the cache, and log probs against their reference."""

import random

import pytest
import torch

from megatron_async.ops.cpu.compiler import compiles
from megatron_async.ops.sampling import log_probs, triton_logits, triton_sampling
from megatron_async.ops.sampling.logits_processing import ChunkTensors
from megatron_async.ops.sampling.sampling import SamplingMode, sample
from megatron_async.ops.sampling.slot_records import (
    MAX_TOP_N,
    OUT_WORDS,
    PROMPT_TOKEN,
    Header,
    RowFeature,
)
from tests.unit_tests.ops.cases import Numbers
from tests.unit_tests.ops.sampling.cases import random_blocks, random_rows
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_memory")
CASES = 4 if INTERPRETED else 20


@pytest.fixture(params=range(CASES))
def rng(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small vocabularies and chunks go through every loop."""
    for module in (triton_logits, log_probs):
        monkeypatch.setattr(module, "TILE", 256)
    monkeypatch.setattr(triton_sampling, "TILE", 512)
    monkeypatch.setattr(triton_logits, "CHUNK_TILE", 64)
    monkeypatch.setattr(triton_logits, "CACHED_PROGRAMS", 2)
    monkeypatch.setattr(triton_sampling, "SEARCH_TILE", 512)


def test_counted_from_blocks_as_from_the_start(rng, device):
    """However much of a sequence was in the cache, its slot is the same behind its first chunk."""
    vocab, length = rng.choice([7, 130, 1003]), rng.choice([1, 5, 33, 260])
    cached = random_blocks(torch.tensor([length], device=device), vocab, rng.choice([1, 3, 16]))
    sequence, memories = cached.first(0, length), []
    for first in {0, 1, length // 2, max(length - 17, 0), max(length - 16, 0), length - 1}:
        if first >= length:
            continue
        torch.manual_seed(0)  # the same former owners
        rows = random_rows(Numbers(device, torch.float32), vocab, 2)
        wanted = RowFeature.PENALTIES | RowFeature.BAD_WORDS | RowFeature.STARTS
        rows.features[0], rows.positions[0] = int(wanted), length
        rows.records[rows.slots[0], Header.PROMPT_LENGTH] = length // 3
        starts = torch.tensor([0, length - first], dtype=torch.int32, device=device)
        chunks = ChunkTensors(0, starts, sequence[first:], length - first, cached)
        triton_logits.begin_chunks_gpu(rows, chunks)
        memories.append(rows.memory)
    for other in memories[1:]:
        assert all(map(torch.equal, memories[0], other))
    counts = memories[0].counts[rows.slots[0]]
    generated = torch.bincount(sequence[length // 3 :], minlength=vocab)
    assert torch.equal(counts & (PROMPT_TOKEN - 1), generated.int())
    marked = torch.bincount(sequence[: length // 3], minlength=vocab) > 0
    assert torch.equal((counts & PROMPT_TOKEN) != 0, marked)


def check_log_probs(rng, device, place, limit):
    vocab, count = rng.choice([1, 7, 130, 1003]), rng.randint(1, 25)
    rows = random_rows(Numbers(device, torch.float32), vocab, count)
    logits = 3 * torch.randn(count, vocab, device=device)
    logits[::2] = logits[::2].round()  # ties
    processed, mode = logits + torch.randn_like(logits).round(), SamplingMode.FILTERED
    if place == "cpu" and rng.random() < 0.3:
        logits[0, 0] = torch.nan
    tokens, cuts = sample.on(place)(processed, rows, mode)
    ring = torch.full((2, count + 1, OUT_WORDS), -3, dtype=torch.int32, device=device)
    expected, entry = ring.clone(), torch.tensor([1], dtype=torch.int32, device=device)
    log_probs.log_probs.on(place)(logits, processed, tokens, cuts, rows, ring, entry)
    log_probs.log_probs.reference(logits, processed, tokens, None, rows, expected, entry)
    assert torch.equal(ring[expected == -3], expected[expected == -3]), "of no row that asks"
    ids, floats = slice(1, 1 + MAX_TOP_N), slice(1 + MAX_TOP_N, None)
    for part in (slice(0, 1), floats):
        ours, theirs = (words.view(torch.float32)[:, :, part] for words in (ring, expected))
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit, equal_nan=True)
    # Alternatives that a filter left out are none, whatever their ids.
    possible = expected.view(torch.float32)[:, :, floats] > -torch.inf
    assert torch.equal(ring[:, :, ids][possible], expected[:, :, ids][possible])


def test_log_probs(rng, device):
    check_log_probs(rng, device, "gpu", 1e-4)


@pytest.mark.skipif(not compiles(), reason="Numba is not here, or switched off")
def test_log_probs_by_loops(rng):
    check_log_probs(rng, "cpu", "cpu", 2e-5)
