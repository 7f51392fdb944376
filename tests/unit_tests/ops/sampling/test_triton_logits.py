"""Tokens counted from blocks of the cache, and the kernels of log probs against their reference."""

import random

import pytest
import torch

from megatron_async.ops.sampling import log_probs, triton_logits, triton_sampling
from megatron_async.ops.sampling.logits_processing import (
    ChunkTensors,
)
from megatron_async.ops.sampling.sampling import SamplingMode
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


def test_log_probs(rng, device):
    vocab, count = rng.choice([7, 130, 1003]), rng.randint(1, 9)
    rows = random_rows(Numbers(device, torch.float32), vocab, count)
    logits = 3 * torch.randn(count, vocab, device=device)
    processed = triton_logits.process_logits_gpu(
        logits, rows, torch.empty_like(logits), torch.empty_like(logits)
    )
    mode = SamplingMode.FILTERED
    tokens, cuts = triton_sampling.sample_gpu(processed, rows, mode)
    ring = torch.full((2, count + 1, OUT_WORDS), -3, dtype=torch.int32, device=device)
    expected = ring.clone()
    entry = torch.tensor([1], dtype=torch.int32, device=device)
    log_probs.log_probs_gpu(logits, processed, tokens, cuts, rows, ring, entry)
    log_probs.log_probs.reference(logits, processed, tokens, None, rows, expected, entry)
    found = ring
    floats = slice(1 + MAX_TOP_N, None)
    for ours, theirs in ((found[:, :, :1], expected[:, :, :1]),
                         (found[:, :, floats], expected[:, :, floats])):  # fmt: skip
        ours, theirs = (part.contiguous().view(torch.float32) for part in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    # Alternatives that a filter left out are none, whatever their ids.
    ids, their_ids = found[:, :, 1 : 1 + MAX_TOP_N], expected[:, :, 1 : 1 + MAX_TOP_N]
    possible = expected[:, :, floats].contiguous().view(torch.float32) > -torch.inf
    assert torch.equal(ids[possible], their_ids[possible])
