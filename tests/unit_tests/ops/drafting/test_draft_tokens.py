"""The kernels that lay out a draft model's tokens, and samples changed so that drafts are accepted
by chance, against plain torch."""

import argparse
import random

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_async.errors import ConfigurationError
from megatron_async.lab import forced_acceptance
from megatron_async.lab.simulate_command import parse_chances
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.drafting.draft_tokens import (
    DraftedStep,
    lay_out_draft,
    lay_out_draft_gpu,
    lay_out_entries,
    lay_out_entries_gpu,
)
from megatron_async.ops.drafting.hidden_states import (
    gather_hidden,
    gather_hidden_gpu,
    keep_hidden,
    keep_hidden_gpu,
)
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header, RowFeature
from megatron_async.ops.step_tensors import StepTensors
from tests.support.attention_model import AttentionModel
from tests.support.compiled_kernels import compile_launches
from tests.support.harness import greedy, make_engine
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

SLOTS, BLOCKS_A_ROW = 12, 9
"""Slots, the last of which is the dummy slot."""


def random_view(chooser, width, block_size, device):
    """A step of random rows, as it stands behind sampling; some rows and tokens are padding."""
    dummy_block = SLOTS * BLOCKS_A_ROW
    lengths = torch.ones(SLOTS, dtype=torch.int32)
    records = torch.zeros(SLOTS, RECORD_WORDS, dtype=torch.int32)
    tables = torch.full((SLOTS, BLOCKS_A_ROW), dummy_block, dtype=torch.int32)
    most = BLOCKS_A_ROW * block_size
    slots = chooser.sample(range(SLOTS - 1), chooser.randint(0, 8))
    cut = chooser.randint(0, len(slots))
    decode, chunks = slots[:cut], []
    for slot in slots:
        tables[slot] = torch.arange(slot * BLOCKS_A_ROW, (slot + 1) * BLOCKS_A_ROW)
        records[slot, Header.MAX_LENGTH] = chooser.randint(3, most)
    before = [chooser.randint(1, int(records[slot, Header.MAX_LENGTH])) for slot in decode]
    for slot, length in zip(decode, before):
        room = int(records[slot, Header.MAX_LENGTH]) - length
        lengths[slot] = length + min(chooser.randint(0, width), room)
    for slot in slots[cut:]:
        end = chooser.randint(1, int(records[slot, Header.MAX_LENGTH]) - 1)
        chunks.append((chooser.randint(1, end), end))
        lengths[slot] = end + 1
    dummies, empty, padding = (chooser.randint(0, 2) for _ in range(3))
    padding = padding if chunks else 0
    empty = empty if chunks else 0
    dims = BatchDimensions(
        len(decode) + dummies,
        width,
        is_captured=True,
        padded_prefill_rows=len(chunks) + empty,
        padded_prefill_tokens=sum(query for query, _ in chunks) + padding,
    )
    if not dims.rows:
        return random_view(chooser, width, block_size, device)
    step = StepTensors.empty(40, 2000, BLOCKS_A_ROW, torch.device(device), 200).head(dims)
    dummy = SLOTS - 1
    owners = [*decode, *[dummy] * dummies, *slots[cut:], *[dummy] * empty]
    step.row_slots.copy_(torch.tensor(owners))
    ends = [end for _, end in chunks]
    step.lengths.copy_(torch.tensor([*before, *[1] * dummies, *ends, *[0] * empty]))
    step.block_tables.copy_(tables[owners])
    if dims.prefill_rows:
        queries = torch.tensor([0, *[query for query, _ in chunks], *[0] * empty])
        step.prefill_starts.copy_(queries.cumsum(0) + dims.decode_tokens)
    kinds = [0, RowFeature.PRODUCES, RowFeature.PRODUCES | RowFeature.REPEATS]
    final = [int(chooser.choice(kinds)) for _ in chunks]
    features = [int(RowFeature.PRODUCES)] * dims.decode_tokens + final + [0] * empty
    step.features.copy_(torch.tensor(features))
    step.token_ids.random_(1000)
    step.write_index.random_(SLOTS * BLOCKS_A_ROW * block_size)
    step.last_token.random_(dims.tokens)
    return DraftedStep(step, dims, records.to(device), lengths.to(device), dummy_block, block_size)


def assert_same(found, expected):
    for name in expected._fields:
        one, other = getattr(found, name).cpu(), getattr(expected, name).cpu()
        assert torch.equal(one, other), (name, one, other)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_kernels_are_the_reference(width, block_size, device):
    """Break it: in `chunk_tokens_kernel` a source of `given - 1`, clamped too early."""
    chooser = random.Random(width + 10 * block_size)
    for _ in range(12):
        torch.manual_seed(chooser.randrange(10**6))
        view = random_view(chooser, width, block_size, device)
        sampled = torch.randint(-1, 1000, (view.dims.sample_rows,), device=device)
        expected = lay_out_entries.reference(view, sampled)
        found = lay_out_entries_gpu(view, sampled)
        assert_same(found, expected)
        assert len(found.token_ids) == view.dims.entries.tokens
        tokens = torch.randint(-1, 1000, (view.dims.rows,), device=device)
        for number in (1, 2):
            of_kernel = lay_out_draft_gpu(view, found, tokens, number)
            assert_same(of_kernel, lay_out_draft.reference(view, expected, tokens, number))


@pytest.mark.parametrize("size", [16, 3000])
def test_hidden_states(size, device):
    torch.manual_seed(size)
    hidden = torch.randn(40, size, device=device)
    kept = torch.randn(11, size, device=device)
    kept[-1] = 0
    places = torch.randperm(11 * 4, device=device)[:40]
    ends = torch.tensor([7, 7, 39], device=device)
    # Those that end a chunk are the last of their block that the step writes.
    places[7], places[39] = 38, 35
    others = [t for t in range(40) if t not in (7, 39)]
    rest = places[others]
    rest[(rest // 4 == 9) | (rest // 4 == 8)] = 40
    places[others] = rest
    expected = kept.clone()
    keep_hidden.reference(hidden, places, ends, 4, expected)
    keep_hidden_gpu(hidden, places, ends, 4, kept)
    assert torch.equal(kept, expected)
    assert not kept[-1].any()
    source = torch.randint(-11, 40, (60,), device=device)
    found = gather_hidden_gpu(hidden, kept, source)
    assert torch.equal(found, gather_hidden.reference(hidden, kept, source))


@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_kernels_are_compiled_once_whatever_the_sizes(monkeypatch):
    """Sizes of 1 too. Break it, and it fails: put a count or a stride into the struct."""
    keys, chooser = compile_launches(monkeypatch), random.Random(1)
    for rows in (1, 5):
        for _ in range(3):
            view = random_view(chooser, 2, 16, "cpu")
            if rows == 1:
                view = view._replace(dummy_block=1, block_size=1)
            sampled = torch.zeros(view.dims.sample_rows, dtype=torch.int64)
            tokens = torch.zeros(view.dims.rows, dtype=torch.int64)
            found = lay_out_entries_gpu(view, sampled)
            lay_out_draft_gpu(view, found, tokens, rows)
    assert {name: len(found) for name, found in keys.items()} == {
        "rows_kernel": 1, "chunk_tokens_kernel": 1, "draft_kernel": 1
    }  # fmt: skip


def random_step(rng, rows, width, device):
    samples = rows * width + 3  # chunks follow
    slots = np.repeat(rng.permutation(rows + 5)[: rows + 3], width)[:samples]
    records = np.zeros((rows + 5, RECORD_WORDS))
    records[:, Header.SEED_LOW] = rng.integers(-(2**31), 2**31, rows + 5)
    arrays = (
        (rng.integers(0, 5, samples), torch.int64),
        (rng.integers(0, 5, samples), torch.int64),
        (slots, torch.int64),
        (rng.integers(0, 9999, samples), torch.int32),
        (records, torch.int32),
        (rng.random(width), torch.float32),
    )
    return [torch.tensor(values, device=device).to(dtype) for values, dtype in arrays]


def test_kernel(device):
    rng = np.random.default_rng(0)
    for rows, width in ((1, 2), (70, 4), (129, 3)):
        sampled, *rest = random_step(rng, rows, width, device)
        truth = sampled.clone()
        forced_acceptance.force_samples(sampled, *rest, rows, width, 5)
        forced_acceptance.force_samples_reference(truth, *rest, rows, width, 5)
        assert torch.equal(sampled, truth)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_compiled_for_a_gpu():
    kernel, pointers = forced_acceptance._force_kernel, ("*i64",) * 3 + ("*i32",) * 2 + ("*fp32",)
    constants = {"width": 4, "tile": 128, "overlap": True}
    kinds = [*pointers, "i32", "i32", *["constexpr"] * 3]
    signature = dict(zip(kernel.arg_names, kinds, strict=True))
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True}
    )
    assert "ptx" in compiled.asm


def test_accepted_as_often_as_asked():
    """By position, of an engine whose drafts are never right by themselves."""
    chances = [0.8, 0.6, 0.45]
    engine = make_engine(
        AttentionModel(), speculative_method="ngram", num_speculative_tokens=3, max_requests=8
    )
    forced_acceptance.force_acceptance(engine, chances)
    engine.generate([[n, 2, 3] for n in range(8)], greedy(400))
    stats = engine.stats()
    engine.close()
    rows = stats["drafted_tokens_at_1"]
    assert rows == pytest.approx(8 * 399 / (1 + 0.8 + 0.48 + 0.216), rel=0.06)
    assert stats["fewer_drafts_narrow_step"] == 0
    before = rows
    for place, chance in enumerate(chances, 1):
        accepted = stats[f"accepted_tokens_at_{place}"]
        assert accepted / before == pytest.approx(chance, abs=0.05)
        before = accepted


def test_what_is_refused():
    assert parse_chances("0.8,1") == [0.8, 1.0]
    for text in ("", "a", "0.5,1.5"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_chances(text)
    engine = make_engine(AttentionModel(), speculative_method="ngram", num_speculative_tokens=2)
    with pytest.raises(ConfigurationError, match=r"num_speculative_tokens=3, not 2"):
        forced_acceptance.force_acceptance(engine, [0.5] * 3)
    engine.close()
