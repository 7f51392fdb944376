"""Cases of the ops that process logits, choose tokens of them and count these."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_async.ops.sampling.logits_processing import (
    CachedTokens,
    ChunkTensors,
    DraftTensors,
    ProcessingRows,
    TokenMemory,
    begin_chunks,
    count_tokens,
    process_logits,
)
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows, sample
from megatron_async.ops.sampling.slot_records import (
    FOREVER,
    HEADER,
    MAX_TOP_N,
    PROMPT_TOKEN,
    RECORD_WORDS,
    WINDOW,
    Header,
    RowFeature,
    pack_record,
)
from megatron_async.ops.sampling.token_mask import apply_token_mask, mask_words
from tests.unit_tests.ops.cases import Arguments, Axes, Numbers, grid

Words = float | Sequence[float] | Tensor


def rows_asking(
    count: int,
    device: str | torch.device = "cpu",
    *,
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
    **numbers: Words,
) -> SamplingRows:
    """Rows in random slots; the last slot's record serves dummy rows. `numbers` are words of
    the header in small letters, `[rows]` or one for all."""
    columns = {
        name: torch.as_tensor(value).expand(count).tolist() for name, value in numbers.items()
    }
    columns["seed_low"], columns["seed_high"] = (
        torch.as_tensor(seeds, device="cpu").view(-1, 1).view(torch.int32).T.tolist()
    )
    slots = torch.randperm(count + 2)[:count]
    records = torch.full((count + 3, RECORD_WORDS), -7, dtype=torch.int32)
    records[-1] = 0
    for row, slot in enumerate(slots.tolist()):
        header = {Header[name.upper()]: column[row] for name, column in columns.items()}
        records[slot, :HEADER] = torch.from_numpy(pack_record(header))
    return SamplingRows(
        slots.to(device),
        torch.as_tensor(positions, dtype=torch.int32).to(device),
        records.to(device),
    )


def parameters(rows: int, device: str, **numbers: Any) -> SamplingRows:
    """Parameters of rows with random seeds and positions, at temperature 1 if not told
    otherwise."""
    seeds, positions = torch.randint(2**62, (rows,)), torch.randint(2**20, (rows,))
    numbers = {"temperature": 1.0} | numbers
    return rows_asking(rows, device, seeds=seeds, positions=positions, **numbers)


def pick(values: Sequence[float], rows: int) -> Tensor:
    """One of the values for each row."""
    return torch.tensor(values)[torch.randint(len(values), (rows,))]


def mixed_parameters(rows: int, device: str) -> SamplingRows:
    """Every kind of row, at random."""
    return parameters(
        rows,
        device,
        temperature=pick([0.0, 0.1, 0.8, 1.0, 3.0], rows),
        top_k=pick([0, 0, 1, 2, 7, 50, 400, 10**6], rows),
        top_p=pick([0.0, 0.0, 0.05, 0.503, 0.907, 0.9909], rows),
        min_p=pick([0.0, 0.0, 0.0, 0.0103, 0.303], rows),
    )


def sample_arguments(at: Numbers, mode: SamplingMode, rows: int, vocab: int) -> Arguments:
    """Arguments of `sample`: logits that are flat, peaked, with ties, and of tokens that are
    banned."""
    logits = pick([0.0, 0.1, 1.0, 4.0, 12.0], rows)[:, None].to(at.device) * torch.randn(
        rows, vocab + 3, device=at.device
    )
    logits[::3] = logits[::3].round()
    logits[1::4].masked_fill_(torch.rand(logits[1::4].shape, device=at.device) < 0.2, -torch.inf)
    params = mixed_parameters(rows, at.device) if mode else None
    return logits.to(at.dtype)[:, :vocab], params, mode


def random_record(rng: random.Random, vocab: int, top_n: int) -> Tensor:
    """Record of a request that asks for anything; quotients by its penalty are exact."""
    tokens = rng.sample(range(vocab), min(vocab, rng.choice([0, 1, 40, 500])))
    edits = [(token, rng.uniform(-9, 9), rng.choice([FOREVER, 3, 30])) for token in tokens]
    edits += [(token, -torch.inf, rng.choice([3, 30])) for token in tokens[:5]]
    words = [
        [rng.randrange(min(vocab, 3)) for _ in range(rng.choice([0, 1, 2, WINDOW - 1]))]
        + [rng.randrange(vocab)]
        for _ in range(rng.choice([0, 1, 64, 64]))
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
        Header.REPETITION: rng.choice([1.0, 2.0]),
        Header.TOP_N: top_n,
        Header.PROMPT_LENGTH: rng.choice([1, 1, 5, 25]),
    }
    return torch.from_numpy(pack_record(numbers, edits, words))


def random_rows(at: Numbers, vocab: int, count: int, width: int = 1) -> ProcessingRows:
    """Every kind of row; the last one a dummy row. With a width over 1 the first half are decode
    rows of so many rows of logits."""
    rng, device = random.Random(int(torch.randint(2**31, ()))), at.device
    slots, decode = count + 3, count // 2 if width > 1 else 0
    counts = torch.randint(3, (slots + 1, vocab), dtype=torch.int32)
    counts |= PROMPT_TOKEN * torch.randint(2, (slots + 1, vocab), dtype=torch.int32)
    recent = torch.randint(min(vocab, 3), (slots + 1, WINDOW), dtype=torch.int32)
    produces = [RowFeature.PRODUCES, RowFeature.PRODUCES, 0]
    features = torch.tensor([rng.randrange(64) | rng.choice(produces) for _ in range(count)])
    records = torch.full((slots + 1, RECORD_WORDS), -7, dtype=torch.int32)
    for slot in range(slots):
        record = random_record(rng, vocab, min(vocab, rng.choice([0, 1, 5, MAX_TOP_N])))
        records[slot, : len(record)] = record
    order, positions = torch.randperm(slots)[:count], torch.randint(1, 40, (count,))
    features[-1], order[-1], records[-1] = RowFeature.PRODUCES, slots, 0
    own = torch.cat((torch.arange(decode).repeat_interleave(width), torch.arange(decode, count)))
    query = torch.cat((torch.arange(width).repeat(decode), torch.zeros(count - decode)))
    drafts = None
    if decode:
        drafts = DraftTensors(
            decode,
            width,
            torch.randint(min(vocab, 3), (decode * width,)).to(device),
            torch.randint(width + 1, (2, count, 4), dtype=torch.int32).to(device),
            torch.ones(1, dtype=torch.int32, device=device),
        )
    return ProcessingRows(
        slots=order[own].to(device),
        positions=(positions[own] + query).to(device, torch.int32),
        records=records.to(device),
        features=features[own].to(device, torch.int32),
        memory=TokenMemory(counts.to(device), recent.to(device)),
        drafts=drafts,
    )


def process_arguments(at: Numbers, vocab: int, rows: int, width: int) -> Arguments:
    """Arguments of `process_logits`."""
    processing = random_rows(at, vocab, rows, width)
    count = len(processing.slots)
    out = torch.full((count + 2, vocab), 7.0, device=at.device)
    return at.rows(count, vocab, pad=2, scale=5.0), processing, out, out.to(at.dtype)


def count_arguments(at: Numbers, vocab: int, rows: int, width: int) -> Arguments:
    """Arguments of `count_tokens`; for some rows no token could be chosen."""
    processing = random_rows(at, vocab, rows, width)
    tokens = torch.randint(vocab, processing.slots.shape, device=at.device)
    return tokens.masked_fill(torch.rand(tokens.shape, device=at.device) < 0.1, -1), processing


def random_blocks(lengths: Tensor, vocab: int, size: int) -> CachedTokens:
    """Tokens of sequences so long, in blocks that some share; what is behind them is no token."""
    wide = -(-int(lengths.max()) // size) + 3
    tables = torch.randint(wide, (len(lengths), wide + 2), dtype=torch.int32)[:, :wide]
    tokens = torch.randint(vocab, (wide + 1, size), dtype=torch.int32)
    for chunk, length in enumerate(lengths.tolist()):
        tables[chunk, -(-length // size) :] = wide
    tokens[wide] = -1
    return CachedTokens(tables.to(lengths.device), tokens.to(lengths.device))


def chunk_arguments(
    at: Numbers, vocab: int, decode: int, lengths: Sequence[int], before: int, block_size: int
) -> Arguments:
    """Arguments of `begin_chunks`, behind decode rows and before two dummy rows: of chunks of these
    lengths, each after `before` tokens, cached ones if there are blocks."""
    end, whole = decode + len(lengths), [*lengths, 0, 0]
    rows = random_rows(at, vocab, decode + len(whole))
    rows.features[end:], rows.slots[end:] = 0, len(rows.records) - 1
    rows.positions[decode:end] = torch.tensor(lengths, device=at.device).int() + before
    starting = torch.rand(len(lengths), device=at.device) < 0.6
    rows.features[decode:end] |= RowFeature.STARTS * starting.int()
    starts = torch.tensor([0, *whole]).cumsum(0).to(at.device, torch.int32)
    token_ids = torch.randint(vocab, (sum(lengths) + 5,), device=at.device)
    cached = random_blocks(rows.positions[decode:], vocab, block_size) if block_size else None
    return rows, ChunkTensors(decode, starts, token_ids, max(lengths), cached)


def mask_arguments(at: Numbers, vocab: int, rows: int) -> Arguments:
    """Arguments of `apply_token_mask`, in rows of a wider array; a NaN stays, allowed or not."""
    logits = torch.randn(rows, vocab, device=at.device)
    logits[0, vocab // 2] = torch.nan
    words = torch.randint(-(2**31), 2**31, (rows, mask_words(vocab) + 3), device=at.device)
    return logits, words.int()[:, 3:]


MODES = [SamplingMode.FILTERED, SamplingMode.SOFTMAX, SamplingMode.GREEDY]
SAMPLED: Axes = {"mode": MODES, "rows vocab": [(16, 1), (16, 6), (16, 257), (16, 1003), (8, 5003)]}
PROCESSED: Axes = {"vocab rows width": [(7, 9, 1), (130, 1, 1), (4100, 6, 1), (130, 40, 3)]}
COUNTED: Axes = {"vocab rows width": [(7, 3, 1), (130, 300, 1), (130, 90, 3)]}
CHUNKS: Axes = {
    "vocab decode lengths": [(7, 0, (1,)), (130, 3, (3, 17, 200, 1)), (4100, 1, (1100, 1))],
    "before block_size": [(0, 0), (4, 0), (90, 3), (17_000, 16)],
}
CASES = [
    *grid(sample, sample_arguments, SAMPLED, shared=lambda found: found[0]),
    *grid(process_logits, process_arguments, PROCESSED),
    *grid(count_tokens, count_arguments, COUNTED),
    *grid(begin_chunks, chunk_arguments, CHUNKS),
    *grid(apply_token_mask, mask_arguments, {"vocab rows": [(7, 5), (32, 1), (4100, 2)]}),
]
