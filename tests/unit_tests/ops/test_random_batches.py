"""A thousand random batches through every kernel but attention's, against the torch references."""

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_async.ops.attention.rope_append import rope_append
from megatron_async.ops.linear.activations import swiglu
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.op import Op
from megatron_async.ops.sampling.sampling import SamplingMode
from tests.unit_tests.ops.attention.cases import rope_arguments
from tests.unit_tests.ops.cases import Arguments, Numbers, OpCase
from tests.unit_tests.ops.linear.cases import activation_arguments, norm_arguments
from tests.unit_tests.ops.sampling import test_triton_sampling
from tests.unit_tests.ops.sampling.cases import mixed_parameters
from tests.unit_tests.ops.test_all_ops import compare
from tests.unit_tests.ops.test_unpack_step import CHECK

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

BATCHES = 1000
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture
def rng() -> random.Random:
    torch.manual_seed(0)
    return random.Random(0)


def rows(rng: random.Random, most: int) -> int:
    """Small batches as often as large ones."""
    return int(most ** rng.random())


def check(
    op: Op[..., Any], make: Callable[..., Arguments], dtype: torch.dtype, *sizes: Any
) -> None:
    case = OpCase(op, lambda at: make(at, *sizes), str(sizes))
    compare(case, op.on("gpu"), Numbers("cuda", dtype))


def test_rms_norm_batches(rng: random.Random):
    for _ in range(BATCHES):
        hidden, dtype = rng.choice((576, 1000, 4096)), rng.choice(DTYPES)
        has_residual, pad = rng.random() < 0.8, rng.choice((0, 7))
        check(add_rms_norm, norm_arguments, dtype, rows(rng, 2048), hidden, has_residual, pad)


def test_rope_append_batches(rng: random.Random):
    shapes = ((3, 3, 64, False), (8, 4, 128, False), (8, 2, 128, True), (2, 7, 80, True))
    for _ in range(BATCHES):
        shape = rng.choice(shapes)
        blocks, block_size = rng.choice(((40, 64), (9, 256), (200, 16)))
        tokens, dtype = rows(rng, blocks * block_size), rng.choice(DTYPES)
        pool = (blocks, block_size, rng.choice((0, 3)))
        check(rope_append, rope_arguments, dtype, tokens, *shape, *pool)


def test_swiglu_batches(rng: random.Random):
    for _ in range(BATCHES):
        ffn, dtype, pad = rng.choice((1536, 1025, 14336)), rng.choice(DTYPES), rng.choice((0, 5))
        check(swiglu, activation_arguments, dtype, rows(rng, 512), 2 * ffn, pad)


def test_sampler_batches(rng: random.Random):
    """Greedy and filtered; every row of a filtered batch has its own filters."""
    for _ in range(BATCHES):
        count, vocab = rows(rng, 64), rng.choice((1003, 49152, 151936))
        spread = rng.choice((0.5, 1.0, 4.0, 12.0))
        logits = (spread * torch.randn(count, vocab, device="cuda")).to(rng.choice(DTYPES))
        test_triton_sampling.check_tokens(logits, None, SamplingMode.GREEDY)
        params = mixed_parameters(count, "cuda")
        test_triton_sampling.check_tokens(logits, params)


def test_unpack_and_feed_back_batches():
    command = [sys.executable, str(CHECK), "cuda", str(BATCHES)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
