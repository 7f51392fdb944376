"""Kernels of tensor-parallel steps: lookup in a share of the vocabulary, sums of partial sums, and
the all-reduce that adds the residual stream and takes the norm."""

from types import SimpleNamespace

import pytest
import torch

from megatron_async.errors import ConfigurationError
from megatron_async.ops.linear.partial_sums import add_partial_sums, launch_sum
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.ranks.symmetric_all_reduce import (
    SymmetricAllReduce,
    all_reduce_add_rms_norm,
)
from megatron_async.ops.ranks.symmetric_memory import Meeting
from megatron_async.ops.ranks.tensor_collectives import TensorCollectives
from megatron_async.ops.ranks.vocab_embedding import vocab_embedding, vocab_embedding_gpu
from tests.unit_tests.ops.stopped_ranks import run_stopped_ranks
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROWS, HIDDEN, EPS = 3, 40, 1e-5
CALLS = (1, 3, 2, 3) * 5
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
    ranks, pointers = len(memory), torch.tensor([part.data_ptr() for part in memory])
    meeting = Meeting(pointers, torch.zeros(ROWS, dtype=torch.int32), rank, ROWS * ranks)
    # What `in_order` reads; the rest needs a process group.
    reducer = object.__new__(SymmetricAllReduce)
    reducer._dtype, reducer.one_shot_rows, reducer._one_shot = torch.float32, 2, meeting
    for call, tokens in enumerate(CALLS):
        residual, weight = inputs(tokens)
        x = summand(rank, call, tokens)
        x = x if call % 2 else x.sum(0)
        if call % 3 == 0:  # in slices of two rows, in the order of ranks
            expected = summand(0, call, tokens).sum(0)
            for peer in range(1, ranks):
                expected = expected + summand(peer, call, tokens).sum(0)
            assert torch.equal(reducer.in_order(x.unsqueeze(-2))[:, 0], expected)
        normed, total = all_reduce_add_rms_norm(x, residual, weight, EPS, meeting)
        results[rank][call, 0, :tokens], results[rank][call, 1, :tokens] = normed, total


@pytest.mark.usefixtures("interpreter")  # GPUs are tested in test_gpu_ranks.py
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reduce_with_residual_and_norm(ranks):
    """Break it: add a rank's own summand first, or leave a row of a slice out."""
    elements = ROWS * ranks + 2 * ROWS * HIDDEN
    memory = [torch.zeros(elements).share_memory_() for _ in range(ranks)]
    results = torch.zeros(ranks, len(CALLS), 2, ROWS, HIDDEN).share_memory_()
    run_stopped_ranks(ranks, run_rank, memory, results)
    assert all(torch.equal(results[0], each) for each in results[1:])
    for call, tokens in enumerate(CALLS):
        residual, weight = inputs(tokens)
        total = sum(summand(rank, call, tokens).sum(0) for rank in range(ranks))
        expected = torch.stack(add_rms_norm.reference(total, residual, weight, EPS))
        torch.testing.assert_close(results[0][call, :, :tokens], expected)


def test_more_than_two_summands_have_an_order():
    """Break it: ask `takes` first."""
    collectives = TensorCollectives(SimpleNamespace(size=lambda: 3, rank=lambda: 0))
    collectives.fallback = "the ranks are on several hosts"
    with pytest.raises(ConfigurationError, match=r"over 3 .* ranks here: the ranks are on several"):
        collectives.check_order()
    x = torch.zeros(700, 1, 8)
    collectives.symmetric[8, x.dtype] = SimpleNamespace(
        one_shot_rows=4, takes=lambda _: True, in_order=lambda _: "in order"
    )
    collectives.check_order()
    assert collectives.all_reduce(x, in_order=True) == "in order"


def test_all_reduce_refuses_what_does_not_fit(device):
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    meeting = Meeting(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 0, 0)
    with pytest.raises(ValueError, match="at most 1 tokens; found 2"):
        all_reduce_add_rms_norm(x, x, weight, EPS, meeting)
    with pytest.raises(ValueError, match="weight must be"):
        all_reduce_add_rms_norm(x, x, weight[:4], EPS, meeting)
