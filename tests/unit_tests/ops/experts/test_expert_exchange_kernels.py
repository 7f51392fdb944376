"""The two exchanges of expert parallelism over symmetric memory, on processes that share memory."""

import pytest
import torch

from megatron_async.ops.experts.expert_exchange import (
    WORD,
    combine_add_rms_norm,
    combine_in_slices,
    combine_sums,
    gather_tokens,
    packed_row_bytes,
)
from megatron_async.ops.experts.expert_routing import NO_EXPERT, Routing
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.ranks.symmetric_memory import Meeting
from tests.unit_tests.ops.stopped_ranks import run_stopped_ranks

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PLACES, HIDDEN, TOPK, EPS = 3, 40, 3, 1e-5
CALLS = (1, 3, 2, 3) * 5
"""Tokens of each rank in successive calls: places take their turns at different times."""
WORDS = packed_row_bytes(HIDDEN, TOPK, torch.float32) // WORD


def own_tokens(rank, call):
    """How many of a rank's tokens are no padding."""
    return max(CALLS[call] - (rank + call) % 3, 0)


def tokens_of(rank, call):
    generator = torch.Generator().manual_seed(100 * call + rank)
    own = own_tokens(rank, call)
    x = torch.randn(own, HIDDEN, generator=generator)
    experts = torch.randint(9, (own, TOPK), generator=generator, dtype=torch.int32)
    return x, Routing(experts, torch.rand(own, TOPK, generator=generator))


def sums_of(rank, call, ranks):
    generator = torch.Generator().manual_seed(9000 + 100 * call + rank)
    return torch.randn(ranks, CALLS[call], HIDDEN, generator=generator)


def check_gathered(rows, call, ranks):
    for peer, found in enumerate(rows.view(ranks, CALLS[call], WORDS * WORD).unbind()):
        own = own_tokens(peer, call)
        x, routing = tokens_of(peer, call)
        start, end = HIDDEN * WORD, HIDDEN * WORD + TOPK * WORD
        experts = found[:, start:end].view(torch.int32)
        assert torch.equal(found[:own, :start].view(torch.float32), x)
        assert torch.equal(experts[:own], routing.experts)
        assert (experts[own:] == NO_EXPERT).all()
        weights = found[:, end : end + TOPK * WORD].view(torch.float32)
        assert torch.equal(weights[:own], routing.weights)


def meeting_of(rank, memory, places=PLACES):
    pointers = torch.tensor([part.data_ptr() for part in memory])
    return Meeting(pointers, torch.zeros(places).int(), rank, places * len(memory))


def run_rank(rank, ranks, gathers, combines, slices):
    """Not in turn, as layers do it: each would keep the other's ranks from running ahead."""
    torch.set_num_threads(1)
    meeting = meeting_of(rank, gathers)
    found = [
        gather_tokens(*tokens_of(rank, call), tokens, meeting) for call, tokens in enumerate(CALLS)
    ]
    for call, rows in enumerate(found):
        check_gathered(rows, call, ranks)
    meeting, few = meeting_of(rank, combines), meeting_of(rank, slices, 2)
    weight = torch.linspace(0.5, 2, HIDDEN)
    for call in range(len(CALLS)):
        own = own_tokens(rank, call)
        mine = sums_of(rank, call, ranks).flatten(0, 1)
        expected = sums_of(0, call, ranks)[rank, :own]
        for peer in range(1, ranks):  # in the order of ranks, on each of them
            expected = expected + sums_of(peer, call, ranks)[rank, :own]
        if call % 3:
            residual = torch.randn(own, HIDDEN + 1)[:, 1:]
            normed, total = combine_add_rms_norm(mine, residual, weight, EPS, meeting)
            reference = add_rms_norm.reference(expected, residual, weight, EPS)
            assert torch.equal(total, reference[1])
            torch.testing.assert_close(normed, reference[0])
        else:
            total = combine_sums(mine, own, meeting)
            assert torch.equal(total, expected)
            assert torch.equal(combine_in_slices(mine, own, few), expected)


@pytest.mark.usefixtures("interpreter")  # GPUs are tested in test_gpu_expert_exchange.py
@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges(ranks):
    flags = PLACES * ranks
    memories = (
        [torch.zeros(flags + 2 * PLACES * row).share_memory_() for _ in range(ranks)]
        for row in (WORDS, ranks * HIDDEN, ranks * HIDDEN)
    )
    run_stopped_ranks(ranks, run_rank, ranks, *memories)


def test_refuses_what_does_not_fit():
    x = torch.zeros(2, 8)
    routing = Routing(torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1))
    meeting = Meeting(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 0, 0)
    with pytest.raises(ValueError, match="at most 1 tokens here and 1 on each rank"):
        gather_tokens(x, routing, 1, meeting)
    with pytest.raises(ValueError, match="experts must be int32"):
        gather_tokens(x[:1], Routing(routing.experts.long(), routing.weights), 1, meeting)
    with pytest.raises(ValueError, match="but experts"):
        gather_tokens(x[:1], routing, 1, meeting)
    with pytest.raises(ValueError, match="at most 1 tokens; found"):
        combine_sums(torch.zeros(4, 8), 2, meeting)
    with pytest.raises(ValueError, match="must be 8 wide"):
        combine_add_rms_norm(x, x[:1, :4], torch.zeros(8), EPS, meeting)
    with pytest.raises(ValueError, match="residual must be"):
        combine_add_rms_norm(x, x[:1].half(), torch.zeros(8), EPS, meeting)
