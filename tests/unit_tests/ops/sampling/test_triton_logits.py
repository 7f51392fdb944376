"""The kernels of processed logits and of log probs against their plain-torch references."""

import random

import pytest
import torch

from megatron_async.ops.sampling import log_probs, token_mask, triton_logits, triton_sampling
from megatron_async.ops.sampling import logits_processing as plain
from megatron_async.ops.sampling.logits_processing import (
    CachedTokens,
    ChunkTensors,
    ProcessingRows,
    TokenMemory,
)
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.ops.sampling.slot_records import (
    FOREVER,
    MAX_TOP_N,
    OUT_WORDS,
    PROMPT_TOKEN,
    RECORD_WORDS,
    WINDOW,
    Header,
    RowFeature,
    pack_record,
)
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
    for module in (triton_logits, log_probs, token_mask):
        monkeypatch.setattr(module, "TILE", 256)
    monkeypatch.setattr(triton_sampling, "TILE", 512)
    monkeypatch.setattr(triton_logits, "CHUNK_TILE", 64)
    monkeypatch.setattr(triton_logits, "CACHED_PROGRAMS", 2)
    monkeypatch.setattr(triton_sampling, "SEARCH_TILE", 512)


def random_record(rng, vocab, top_n):
    tokens = rng.sample(range(vocab), min(vocab, rng.choice([0, 1, 40, 500])))
    edits = [(token, rng.uniform(-9, 9), rng.choice([FOREVER, 3, 30])) for token in tokens]
    edits += [(token, -torch.inf, rng.choice([3, 30])) for token in tokens[:5]]
    words = [
        [rng.randrange(min(vocab, 3)) for _ in range(rng.choice([1, 2, 3, WINDOW]))]
        for _ in range(rng.choice([0, 1, 64]))
    ]
    numbers = {
        Header.TEMPERATURE: rng.choice([0.0, 0.5, 1.0, 2.0]),
        Header.TOP_K: rng.choice([0, 0, 1, 3, 40]),
        Header.TOP_P: rng.choice([0.0, 0.0, 0.61]),
        Header.MIN_P: rng.choice([0.0, 0.0, 0.053]),
        Header.SEED_LOW: rng.randrange(-(2**31), 2**31),
        Header.SEED_HIGH: rng.randrange(2**31),
        Header.FREQUENCY: rng.choice([0.0, 0.7]),
        Header.PRESENCE: rng.choice([0.0, -0.4]),
        Header.REPETITION: rng.choice([1.0, 1.3]),
        Header.TOP_N: top_n,
        Header.PROMPT_LENGTH: rng.choice([1, 5, 25]),
    }
    return torch.from_numpy(pack_record(numbers, edits, words))


def random_rows(rng, vocab, count, device):
    """Every kind of row; the last one a dummy row."""
    slots = count + 3
    counts = torch.randint(3, (slots + 1, vocab), dtype=torch.int32).to(device)
    counts.bitwise_or_(PROMPT_TOKEN * torch.randint(2, (slots + 1, vocab), device=device))
    recent = torch.randint(min(vocab, 3), (slots + 1, WINDOW), dtype=torch.int32).to(device)
    features = torch.tensor([rng.randrange(64) | RowFeature.PRODUCES for _ in range(count)])
    order = torch.randperm(slots)[:count]
    records = torch.full((slots + 1, RECORD_WORDS), -7, dtype=torch.int32)
    for slot in range(slots):
        record = random_record(rng, vocab, min(vocab, rng.choice([0, 1, 5, MAX_TOP_N])))
        records[slot, : len(record)] = record
    features[-1], order[-1] = RowFeature.PRODUCES, slots
    records[-1] = 0
    return ProcessingRows(
        slots=order.to(device),
        positions=torch.randint(1, 40, (count,), dtype=torch.int32).to(device),
        records=records.to(device),
        features=features.to(torch.int32).to(device),
        memory=TokenMemory(counts, recent),
    )


def copy_of(rows):
    memory = TokenMemory(*(tensor.clone() for tensor in rows.memory))
    return ProcessingRows(rows.slots, rows.positions, rows.records.clone(), rows.features, memory)


def same_memory(rows, other):
    for name in TokenMemory._fields:
        assert torch.equal(getattr(rows.memory, name), getattr(other.memory, name)), name


def on_cpu(rows):
    """The references read numbers back, so they get their own copies."""
    moved = copy_of(rows)
    fields = (moved.slots, moved.positions, moved.records, moved.features)
    memory = TokenMemory(*(tensor.cpu() for tensor in moved.memory))
    return ProcessingRows(*(field.cpu() for field in fields), memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_are_processed(rng, device, dtype):
    vocab, count = rng.choice([7, 130, 1003]), rng.randint(1, 9)
    rows = random_rows(rng, vocab, count, device)
    logits = (5 * torch.randn(count, vocab + 2, device=device)).to(dtype)[:, :vocab]
    out = torch.full((count + 2, vocab), 7.0, device=device)
    kept = torch.full((count + 2, vocab), 7.0, dtype=dtype, device=device)
    their_out, their_kept = out.cpu(), kept.cpu()
    found = triton_logits.process_logits_gpu(logits, rows, out, kept)
    plain.process_logits.reference(logits.cpu(), on_cpu(rows), their_out, their_kept)
    assert torch.equal(found, out[:count])
    torch.testing.assert_close(out.cpu(), their_out, rtol=1e-5, atol=1e-5)
    assert torch.equal(kept.cpu(), their_kept)


def test_tokens_are_masked(rng, device):
    vocab, count = rng.choice([7, 32, 130, 1003]), rng.randint(1, 5)
    logits = torch.randn(count, vocab, device=device)
    logits[0, vocab // 2] = torch.nan  # allowed or not, it stays
    shape = (count, token_mask.mask_words(vocab) + 3)  # the rows of a wider array
    words = torch.randint(-(2**31), 2**31, shape).to(device, torch.int32)[:, 3:]
    expected = logits.cpu()
    token_mask.apply_token_mask_gpu(logits, words)
    token_mask.apply_token_mask.reference(expected, words.cpu())
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert logits[0, vocab // 2].isnan()


def test_samples_are_counted(rng, device):
    vocab, count = rng.choice([7, 130]), rng.randint(1, 300)
    rows = random_rows(rng, vocab, count, device)
    drop = torch.rand(count, device=device) < 0.3  # chunks that leave part of a prompt
    rows.features[drop] &= ~int(RowFeature.PRODUCES)
    expected = on_cpu(rows)
    tokens = torch.randint(vocab, (count,), device=device)
    tokens[torch.rand(count, device=device) < 0.1] = -1  # no token could be chosen
    triton_logits.count_tokens_gpu(tokens, rows)
    plain.count_tokens.reference(tokens.cpu(), expected)
    same_memory(on_cpu(rows), expected)


@pytest.mark.parametrize("has_cached", [False, True])
def test_chunks_are_counted(rng, device, has_cached):
    vocab, decode = rng.choice([7, 130, 1003]), rng.randint(0, 3)
    lengths = [rng.choice([1, 3, 17, 200]) for _ in range(rng.randint(1, 4))]
    dummies = rng.choice([0, 2])
    rows = random_rows(rng, vocab, decode + len(lengths) + dummies + 1, device)
    chunks = len(lengths) + dummies + 1  # the last row is a dummy anyway
    rows.features[decode + len(lengths) :] = 0
    rows.slots[decode + len(lengths) :] = len(rows.records) - 1
    for chunk, length in enumerate(lengths):
        row = decode + chunk
        rows.positions[row] = length + rng.choice([0, 4, *[90, 400] * has_cached])
        if rng.random() < 0.6:
            rows.features[row] |= int(RowFeature.STARTS)
    starts = [0]
    for length in lengths + [0] * (chunks - len(lengths)):
        starts.append(starts[-1] + length)
    given = {
        "first_row": decode,
        "starts": torch.tensor(starts, dtype=torch.int32),
        "token_ids": torch.randint(vocab, (starts[-1] + 5,)),
    }
    longest = max(lengths)
    cached = random_blocks(rng, rows.positions[decode:].cpu(), vocab) if has_cached else None
    expected = on_cpu(rows)
    plain.begin_chunks.reference(
        expected, ChunkTensors(**given, max_query_length=longest, cached=cached)
    )
    moved = {
        name: value if isinstance(value, int) else value.to(device) for name, value in given.items()
    }
    if cached is not None:
        cached = CachedTokens(cached.block_tables.to(device), cached.block_tokens.to(device))
    triton_logits.begin_chunks_gpu(
        rows, ChunkTensors(**moved, max_query_length=longest, cached=cached)
    )
    found = on_cpu(rows)
    # The dummy slot's state is nobody's.
    for memory in (found.memory, expected.memory):
        memory.counts[-1], memory.recent[-1] = 0, 0
    same_memory(found, expected)


def random_blocks(rng, lengths, vocab):
    """Tokens of sequences so long, in blocks that some share; what is behind them is no token."""
    size = rng.choice([1, 3, 16])
    wide = -(-int(lengths.max()) // size) + rng.choice([0, 3])
    tables = torch.randint(wide, (len(lengths), wide + 2), dtype=torch.int32)[:, :wide]
    tokens = torch.randint(vocab, (wide + 1, size), dtype=torch.int32)
    for chunk, length in enumerate(lengths.tolist()):
        tables[chunk, -(-length // size) :] = wide
    tokens[wide] = -1
    return CachedTokens(tables, tokens)


def test_counted_from_blocks_as_from_the_start(rng, device):
    """However much of a sequence was in the cache, its slot is the same behind its first chunk."""
    vocab, length = rng.choice([7, 130, 1003]), rng.choice([1, 5, 33, 260])
    cached = random_blocks(rng, torch.tensor([length]), vocab)
    sequence = cached.first(0, length)
    cached = CachedTokens(cached.block_tables.to(device), cached.block_tokens.to(device))
    states = []
    for first in {0, 1, length // 2, max(length - 17, 0), max(length - 16, 0), length - 1}:
        if first >= length:
            continue
        torch.manual_seed(0)  # the same former owners
        rows = random_rows(random.Random(0), vocab, 2, device)
        wanted = RowFeature.PENALTIES | RowFeature.BAD_WORDS | RowFeature.STARTS
        rows.features[0], rows.positions[0] = int(wanted), length
        rows.records[rows.slots[0], Header.PROMPT_LENGTH] = length // 3
        chunks = ChunkTensors(
            first_row=0,
            starts=torch.tensor([0, length - first], dtype=torch.int32, device=device),
            token_ids=sequence[first:].to(device),
            max_query_length=length - first,
            cached=cached,
        )
        triton_logits.begin_chunks_gpu(rows, chunks)
        states.append(on_cpu(rows))
    for other in states[1:]:
        same_memory(states[0], other)
    counts = states[0].memory.counts[states[0].slots[0]]
    generated = torch.bincount(sequence[length // 3 :], minlength=vocab)
    assert torch.equal(counts & (PROMPT_TOKEN - 1), generated.int())
    marked = torch.bincount(sequence[: length // 3], minlength=vocab) > 0
    assert torch.equal((counts & PROMPT_TOKEN) != 0, marked)


def test_log_probs(rng, device):
    vocab, count = rng.choice([7, 130, 1003]), rng.randint(1, 9)
    rows = random_rows(rng, vocab, count, device)
    logits = 3 * torch.randn(count, vocab, device=device)
    processed = triton_logits.process_logits_gpu(
        logits, rows, torch.empty_like(logits), torch.empty_like(logits)
    )
    mode = SamplingMode.FILTERED
    tokens, cuts = triton_sampling.sample_gpu(processed, rows, mode)
    ring = torch.full((2, count + 1, OUT_WORDS), -3, dtype=torch.int32, device=device)
    expected = ring.cpu()
    entry = torch.tensor([1], dtype=torch.int32, device=device)
    log_probs.log_probs_gpu(logits, processed, tokens, cuts, rows, ring, entry)
    log_probs.log_probs.reference(
        logits.cpu(), processed.cpu(), tokens.cpu(), None, on_cpu(rows), expected, entry.cpu(),
    )  # fmt: skip
    found = ring.cpu()
    floats = slice(1 + MAX_TOP_N, None)
    for ours, theirs in ((found[:, :, :1], expected[:, :, :1]),
                         (found[:, :, floats], expected[:, :, floats])):  # fmt: skip
        ours, theirs = (part.contiguous().view(torch.float32) for part in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    # Alternatives that a filter left out are none, whatever their ids.
    ids, their_ids = found[:, :, 1 : 1 + MAX_TOP_N], expected[:, :, 1 : 1 + MAX_TOP_N]
    possible = expected[:, :, floats].contiguous().view(torch.float32) > -torch.inf
    assert torch.equal(ids[possible], their_ids[possible])
