"""Compilations of the kernels that lay out a draft model's tokens; and samples changed so that
drafts are accepted by chance, against plain torch."""

import argparse

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_async.errors import ConfigurationError
from megatron_async.lab import forced_acceptance
from megatron_async.lab.simulate_command import parse_chances
from megatron_async.ops.drafting.draft_tokens import lay_out_draft_gpu, lay_out_entries_gpu
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header
from tests.support.attention_model import AttentionModel
from tests.support.compiled_kernels import compile_launches
from tests.support.harness import greedy, make_engine
from tests.unit_tests.ops.cases import Numbers
from tests.unit_tests.ops.drafting.cases import entry_arguments
from tests.unit_tests.ops.triton_interpreter import INTERPRETED


@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_kernels_are_compiled_once_whatever_the_sizes(monkeypatch):
    """Sizes of 1 too. Break it, and it fails: put a count or a stride into the struct."""
    keys, at = compile_launches(monkeypatch), Numbers("cpu", torch.float32)
    for decode, chunks, dummies in ((1, 1, 0), (5, 3, 1), (0, 4, 2)):
        view, sampled = entry_arguments(at, 2, 16, decode, chunks, dummies)
        if decode == 1:
            view = view._replace(dummy_block=1, block_size=1)
        found = lay_out_entries_gpu(view, sampled)
        tokens = torch.zeros(view.dims.rows, dtype=torch.int64)
        lay_out_draft_gpu(view, found, tokens, max(decode, 1))
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
