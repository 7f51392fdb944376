"""Drafts by lookup: against a search in Python, kernel and reference; and compiled for a GPU."""

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_async.ops.drafting import ngram_lookup, store_drafts
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header
from tests.support.draft_watches import wanted_drafts
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

HOPPER = GPUTarget("cuda", 90, 32)
MANY = 99


def check(sequences, allowed, count, block_size, where, look_up, searched=16384):
    """Rows of these sequences, in random slots and blocks, among tokens of others."""
    rng = np.random.default_rng(len(sequences) + count)
    rows, slots = len(sequences), len(sequences) + 3
    blocks = max(-(-len(tokens) // block_size) for tokens in sequences) + 1
    pool = rows * blocks + 2
    owned = rng.permutation(pool)[: rows * blocks].reshape(rows, blocks)
    kept = rng.integers(0, 5, (pool, block_size))
    order = rng.permutation(slots)[:rows]
    lengths, last = rng.integers(1, 9, slots), rng.integers(0, 5, slots)
    records = rng.integers(0, 99, (slots, RECORD_WORDS))
    for row, tokens in enumerate(sequences):
        # The last token is not in the cache: what stands at its place and behind is anybody's.
        for place, token in enumerate(tokens[:-1]):
            kept[owned[row, place // block_size], place % block_size] = token
        lengths[order[row]], last[order[row]] = len(tokens), tokens[-1]
        records[order[row], Header.DRAFTS] = allowed[row]

    def tensor(values, dtype):
        return torch.tensor(np.ascontiguousarray(values), dtype=dtype, device=where)

    found = look_up(
        tensor(kept, torch.int32),
        tensor(owned, torch.int32),
        tensor(order, torch.int64),
        tensor(lengths, torch.int32),
        tensor(last, torch.int64),
        tensor(records, torch.int32),
        count,
        searched,
    )
    assert found.dtype == torch.int64
    for row, tokens in enumerate(sequences):
        wanted = wanted_drafts(list(map(int, tokens)), count, searched)
        wanted[allowed[row] :] = [-1] * (count - min(allowed[row], count))
        assert found[row].tolist() == wanted, (row, tokens)


def random_sequences(rng, rows, longest, vocabulary):
    return [rng.integers(0, vocabulary, rng.integers(1, longest)).tolist() for _ in range(rows)]


CHOSEN = [
    [7],
    [7, 7],
    [7, 7, 7],
    [7, 7, 7, 7, 7],
    [1, 2, 3, 1, 2],
    [1, 2, 3, 9, 2, 3, 8, 5, 3, 1, 2, 3],  # a longer match before a later one
    [1, 2, 3, 4, 1, 2, 9, 1, 2],  # of two the later
    [1, 2, 1, 2, 1],  # it overlaps what it matches
    [5, 1, 2, 3, 4, 6, 9, 1, 2, 3, 4],
    [9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 7, 9, 1, 2, 3, 4],  # five equal tokens are as four
    [3, 1, 4, 1, 5, 9, 2, 6],
]


def check_all(where, look_up):
    for count in (1, 2, 3, 5):
        for block_size in (1, 3, 4, 16):
            check(CHOSEN, [MANY] * len(CHOSEN), count, block_size, where, look_up)
    rng = np.random.default_rng(1)
    for case in range(12):
        sequences = random_sequences(rng, int(rng.integers(1, 9)), 60, (2, 3, 12)[case % 3])
        allowed = rng.integers(0, 5, len(sequences))
        searched = (16384, 20, 5)[case // 4]
        check(sequences, allowed, 3, (1, 4, 7)[case % 3], where, look_up, searched)


def test_reference():
    check_all("cpu", ngram_lookup.ngram_drafts.reference)


@pytest.mark.parametrize("tile", [2048, 16])
def test_kernel(device, monkeypatch, tile):
    """With small tiles a row is searched by several programs. Break one of these, and it fails:
    `place < last` as `place <= last`; `>= first` as `> first`; the row's score without the place;
    `_copy_kernel` without `place == last`."""
    monkeypatch.setattr(ngram_lookup, "TILE", tile)
    check_all(device, ngram_lookup.ngram_drafts_gpu)


@pytest.mark.parametrize("searched", [16384, 300])
def test_long_rows(device, searched):
    """Matches on both sides of borders of tiles and blocks."""
    rng = np.random.default_rng(2)
    sequences = [rng.integers(0, 40, length).tolist() for length in (2049, 2050, 4100, 70, 1)]
    allowed = [MANY] * len(sequences)
    look_up = ngram_lookup.ngram_drafts_gpu
    check(sequences, allowed, 4, 64, device, look_up, searched)


POINTERS = {
    "block_tokens": "*i32", "block_tables": "*i32", "row_slots": "*i64", "lengths": "*i32",
    "last_token": "*i64", "records": "*i32", "best": "*i32", "drafts": "*i64", "entry": "*i32",
    "by_slot": "*i64", "ring": "*i32", "host": "*i32",
}  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (
            ngram_lookup._match_kernel,
            {"block_size": 64, "longest": 4, "shortest": 2, "places": 1 << 27, "tile": 2048},
        ),
        (
            ngram_lookup._copy_kernel,
            {"block_size": 64, "places": 1 << 27, "parts_tile": 8, "drafts_tile": 4},
        ),
        (store_drafts._store_drafts_kernel, {"words": 9, "count": 3, "tile": 128}),
    ],
    ids=["match", "copy", "store"],
)
def test_compiled_for_a_gpu(kernel, constants):
    """Types that the interpreter takes and a GPU's compiler does not."""
    constants = constants | {"overlap": True}
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= {name: POINTERS.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, constants)
    options = {"num_warps": 4, "launch_pdl": True}
    assert "ptx" in triton.compile(source, target=HOPPER, options=options).asm
