"""A thousand random batches through every kernel but attention's, against the torch references."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from megatron_async.ops.sampling.sampling import SamplingMode
from tests.unit_tests.ops.attention import test_rope_append
from tests.unit_tests.ops.linear import test_rms_norm, test_swiglu
from tests.unit_tests.ops.sampling import test_triton_sampling
from tests.unit_tests.ops.test_unpack_step import CHECK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
]

BATCHES = 1000
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty is full of NaN (or the largest integer), so what a kernel leaves out is seen."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


def rows(rng: random.Random, most: int) -> int:
    """Small batches as often as large ones."""
    return int(most ** rng.random())


def test_rms_norm_batches(rng: random.Random):
    for _ in range(BATCHES):
        hidden, dtype = rng.choice((576, 1000, 4096)), rng.choice(DTYPES)
        residual, stride = rng.random() < 0.8, rng.choice((0, 7))
        test_rms_norm.check(rows(rng, 2048), hidden, dtype, "cuda", residual, stride)


def test_rope_append_batches(rng: random.Random):
    shapes = ((3, 3, 64, False), (8, 4, 128, False), (8, 2, 128, True), (2, 7, 80, True))
    for _ in range(BATCHES):
        *shape, norm = rng.choice(shapes)
        blocks, block_size = rng.choice(((40, 64), (9, 256), (200, 16)))
        tokens, dtype = rows(rng, blocks * block_size), rng.choice(DTYPES)
        pool = {"blocks": blocks, "block_size": block_size, "stride": rng.choice((0, 3))}
        arguments = test_rope_append.inputs(tokens, *shape, dtype, "cuda", norm, **pool)
        test_rope_append.check(arguments)


def test_swiglu_batches(rng: random.Random):
    for _ in range(BATCHES):
        ffn, dtype, stride = rng.choice((1536, 1025, 14336)), rng.choice(DTYPES), rng.choice((0, 5))
        test_swiglu.check(rows(rng, 512), ffn, dtype, "cuda", stride)


def test_sampler_batches(rng: random.Random):
    """Greedy and filtered; every row of a filtered batch has its own filters."""
    for _ in range(BATCHES):
        count, vocab = rows(rng, 64), rng.choice((1003, 49152, 151936))
        spread = rng.choice((0.5, 1.0, 4.0, 12.0))
        logits = (spread * torch.randn(count, vocab, device="cuda")).to(rng.choice(DTYPES))
        test_triton_sampling.check_tokens(logits, None, SamplingMode.GREEDY)
        params = test_triton_sampling.mixed_parameters(count, "cuda")
        test_triton_sampling.check_tokens(logits, params)


def test_unpack_and_feed_back_batches():
    command = [sys.executable, str(CHECK), "cuda", str(BATCHES)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
