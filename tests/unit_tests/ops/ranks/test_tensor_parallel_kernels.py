"""Kernels of tensor-parallel steps: lookup in a share of the vocabulary, sums of partial sums, and
the all-reduce that adds the residual stream and takes the norm."""

import pytest
import torch

from megatron_async.ops.linear.partial_sums import add_partial_sums, launch_sum
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.ranks.symmetric_all_reduce import all_reduce_add_rms_norm
from megatron_async.ops.ranks.symmetric_memory import Meeting
from megatron_async.ops.ranks.vocab_embedding import vocab_embedding, vocab_embedding_gpu
from tests.unit_tests.ops.stopped_ranks import run_stopped_ranks
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT

pytestmark = pytest.mark.usefixtures("poisoned_memory")

RANKS, ROWS, HIDDEN, EPS = 2, 3, 40, 1e-5
CALLS = (1, 3, 2, 3) * 12
"""Tokens of successive calls: rows take their turns at different times."""


def test_lookup_gives_own_rows_and_zeros():
    whole, tokens = torch.randn(12, 8), torch.tensor([0, 11, 4, 5, 4, 7])
    shares = [(tokens, whole[first : first + 4], first) for first in (0, 4, 8)]
    assert torch.equal(sum(vocab_embedding.reference(*share) for share in shares), whole[tokens])
    scaled = sum(vocab_embedding.reference(*share, 4.0) for share in shares)
    assert torch.equal(scaled, 4 * whole[tokens])


def test_lookup_refuses_a_strided_weight(device):
    with pytest.raises(ValueError, match="contiguous"):
        vocab_embedding_gpu(torch.zeros(1, dtype=torch.int64), torch.zeros(4, 6).t(), 0)


@pytest.mark.parametrize("parts", [1, 3])
def test_partial_sums(parts, device):
    product = torch.randn(parts, 5, 1, 300, device=device)
    out = torch.empty(5, 1, 300, dtype=EXACT_16_BIT[-1], device=device)
    expected = sum(product[1:], product[0]).to(out.dtype)
    assert torch.equal(launch_sum(product, parts, out), expected)
    assert torch.equal(add_partial_sums(product, torch.float32), sum(product[1:], product[0]))
    whole = product[0].contiguous()
    assert add_partial_sums(whole, torch.float32) is whole


def test_partial_sums_refuse_strided_memory(device):
    product = torch.randn(2, 5, 1, 8, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        launch_sum(product[..., ::2], 2, torch.empty(5, 1, 4, device=device))


def summand(rank, call, tokens):
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(2, tokens, HIDDEN, generator=generator)


def inputs(tokens):
    generator = torch.Generator().manual_seed(tokens)
    residual = torch.randn(tokens, HIDDEN, generator=generator)
    return residual, torch.randn(HIDDEN, generator=generator)


def run_rank(rank, memory, results):
    pointers = torch.tensor([part.data_ptr() for part in memory])
    meeting = Meeting(pointers, torch.zeros(ROWS, dtype=torch.int32), rank, ROWS * RANKS)
    for call, tokens in enumerate(CALLS):
        residual, weight = inputs(tokens)
        x = summand(rank, call, tokens)
        x = x if call % 2 else x.sum(0)
        normed, total = all_reduce_add_rms_norm(x, residual, weight, EPS, meeting)
        results[rank][call, 0, :tokens], results[rank][call, 1, :tokens] = normed, total


@pytest.mark.usefixtures("interpreter")  # GPUs are tested in test_gpu_ranks.py
def test_all_reduce_with_residual_and_norm():
    elements = ROWS * RANKS + 2 * ROWS * HIDDEN
    memory = [torch.zeros(elements).share_memory_() for _ in range(RANKS)]
    results = torch.zeros(RANKS, len(CALLS), 2, ROWS, HIDDEN).share_memory_()
    run_stopped_ranks(RANKS, run_rank, memory, results)
    assert torch.equal(results[0], results[1])
    for call, tokens in enumerate(CALLS):
        residual, weight = inputs(tokens)
        total = sum(summand(rank, call, tokens).sum(0) for rank in range(RANKS))
        expected = torch.stack(add_rms_norm.reference(total, residual, weight, EPS))
        torch.testing.assert_close(results[0][call, :, :tokens], expected)


def test_all_reduce_refuses_what_does_not_fit(device):
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    meeting = Meeting(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 0, 0)
    with pytest.raises(ValueError, match="at most 1 tokens; found 2"):
        all_reduce_add_rms_norm(x, x, weight, EPS, meeting)
    with pytest.raises(ValueError, match="weight must be"):
        all_reduce_add_rms_norm(x, x, weight[:4], EPS, meeting)
