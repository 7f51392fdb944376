"""Exchanges of expert parallelism on GPUs through symmetric memory: NCCL's values, captured, and
what is served without it."""

import os
import random

import pytest
import torch
from torch import Tensor

from megatron_async.devices import make_device
from megatron_async.models.moe_experts import TokenDispatcher
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups, world_size
from megatron_async.ops.experts.expert_exchange import (
    LIMIT_VARIABLE,
    ExpertExchange,
    combine_in_slices,
    exchange_of,
)
from megatron_async.ops.experts.expert_routing import NO_EXPERT, Routing
from megatron_async.ops.linear.rms_norm import add_rms_norm
from tests.support.cards import on_cards
from tests.support.ranks import run_ranks

HIDDEN, TOPK, EPS, MOST = 512, 3, 1e-5, 256
TOKENS = (1, 3, 64, 256, 300, 2)
"""Tokens of each rank; the workspaces hold all but 300."""
TURNS = 20


def make_dispatcher() -> tuple[TokenDispatcher, ExpertExchange, int]:
    """A dispatcher over all ranks, its exchange before `prepare`, and this rank."""
    make_device("cuda")
    groups = ensure_process_groups(ParallelSizes(expert_model_parallel=world_size()))
    exchange = exchange_of(groups.ep)
    assert not exchange.symmetric
    return TokenDispatcher(groups.ep, TOPK), exchange, groups.ep.rank()


def tolerance_of(dtype: torch.dtype) -> dict[str, float]:
    return {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}


def prepare(exchange: ExpertExchange, dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    exchange.prepare(MOST, HIDDEN, TOPK, dtype, device)


def exchanged(
    dispatcher: TokenDispatcher, rank: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Many turns: tokens and their routing from all ranks, without padding, and sums."""
    found = []
    tolerance = tolerance_of(dtype)
    for turn in range(TURNS):
        for tokens in TOKENS:
            generator = torch.Generator().manual_seed(1000 * turn + 10 * tokens + rank)
            own = max(tokens - (turn + rank) % 3, 0)
            x = torch.randn(own, HIDDEN, generator=generator).to(dtype).cuda()
            experts = torch.randint(9, (own, TOPK), generator=generator, dtype=torch.int32).cuda()
            weights = torch.rand(own, TOPK, generator=generator).cuda()
            torch.cuda._sleep(random.randrange(100_000))  # ranks come early and late
            gathered, routing = dispatcher.dispatch(x, Routing(experts, weights), tokens)
            real = (routing.experts != NO_EXPERT).all(1)
            assert len(real) == tokens * world_size()
            sums = torch.randn(len(real), HIDDEN, generator=generator).to(dtype).cuda()
            total = dispatcher.combine(sums, own)
            assert total.shape == (own, HIDDEN)
            for made in dispatcher._exchange.symmetric.values():
                sliced = combine_in_slices(sums, own, made.combines)
                if tokens <= made.combines.places:
                    assert torch.equal(sliced, total)
                torch.testing.assert_close(sliced, total, **tolerance)
            found.append((gathered[real], routing.experts, routing.weights[real], total))
            if dispatcher.combines_with_norm(sums):
                residual = torch.randn(own, HIDDEN, generator=generator).to(dtype).cuda()
                weight = torch.linspace(0.5, 2, HIDDEN).to(dtype).cuda()
                out = dispatcher.combine_add_rms_norm(sums, residual, weight, EPS)
                assert torch.equal(out[1], residual + total)
                if own:
                    reference, _ = add_rms_norm.reference(total, residual, weight, EPS)
                    torch.testing.assert_close(out[0], reference, **tolerance)
    return found


def compare(dtype_name: str) -> dict[str, int]:
    """Checks exchanges against NCCL's; returns the calls of both."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    dispatcher, exchange, rank = make_dispatcher()
    expected = exchanged(dispatcher, rank, dtype)
    prepare(exchange, dtype)
    assert exchange.symmetric, exchange.fallback
    tolerance = tolerance_of(dtype)
    for before, after in zip(expected, exchanged(dispatcher, rank, dtype), strict=True):
        assert all(torch.equal(*pair) for pair in zip(before[:3], after[:3]))
        torch.testing.assert_close(after[3], before[3], **tolerance)
    return dict(exchange.calls)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ranks", on_cards([2, 4]))
def test_exchanges_give_what_nccl_gives(ranks: int, dtype: str) -> None:
    ours, beyond = TURNS * (len(TOKENS) - 1), TURNS * len(TOKENS) + TURNS
    expected = {"gather": ours, "combine": ours, "combine with norm": ours}
    expected |= {"all-gather": beyond, "reduce-scatter": beyond}
    assert run_ranks(ranks, compare, dtype, timeout_s=180) == [expected] * ranks


def replayed() -> dict[str, int]:
    """A graph of a chain of exchanges, replayed with other inputs each time."""
    dispatcher, exchange, rank = make_dispatcher()
    prepare(exchange, torch.float32)
    device = make_device("cuda")
    x = torch.zeros(7, HIDDEN, device="cuda")
    experts = torch.zeros(7, TOPK, device="cuda", dtype=torch.int32)
    weights, norm = torch.ones(7, TOPK, device="cuda"), torch.ones(HIDDEN, device="cuda")
    out = torch.zeros_like(x)
    seen = torch.zeros(world_size() * 7, TOPK, device="cuda", dtype=torch.int32)

    def chain() -> None:
        total = x
        for _ in range(3):
            gathered, routing = dispatcher.dispatch(total, Routing(experts, weights), 0)
            total = dispatcher.combine(gathered * (rank + 1), 7)
        seen.copy_(routing.experts)
        gathered, _ = dispatcher.dispatch(total, Routing(experts, weights), 0)
        out.copy_(dispatcher.combine_add_rms_norm(gathered * 1.0, total, norm, EPS)[1])

    def fill(number: int) -> None:
        x.fill_(number + rank)
        experts.fill_(number + rank)

    device.fence()
    device.compute.launch(chain)
    graph = device.capture(chain)
    factor = sum(range(1, world_size() + 1)) ** 3 * (world_size() + 1)
    for number in range(200):
        device.compute.launch(lambda number=number: fill(number))
        device.compute.launch(graph.replay)
        torch.cuda.synchronize()
        assert bool((out == factor * (number + rank)).all()), (number, out)
        by_rank = seen.view(world_size(), -1).float().mean(1).tolist()
        assert by_rank == [number + peer for peer in range(world_size())]
    return dict(exchange.calls)


@pytest.mark.parametrize("ranks", on_cards([2, 4]))
def test_captured_exchanges_follow_their_inputs(ranks: int) -> None:
    calls = {"gather": 8, "combine": 6, "combine with norm": 2}
    assert run_ranks(ranks, replayed, timeout_s=120) == [calls] * ranks


def limited() -> tuple[dict[str, int], str | None]:
    """One rank has the exchanges turned off."""
    if os.environ["RANK"] == "1":
        os.environ[LIMIT_VARIABLE] = "0"
    dispatcher, exchange, rank = make_dispatcher()
    prepare(exchange, torch.float32)
    x, weights = torch.full((2, HIDDEN), 1.0 + rank, device="cuda"), torch.ones(2, TOPK).cuda()
    gathered, _ = dispatcher.dispatch(x, Routing(weights.int(), weights), 0)
    assert bool((dispatcher.combine(gathered * 1.0, 2) == 2 * x).all())
    return dict(exchange.calls), exchange.report


@pytest.mark.gpus(2)
def test_ranks_agree_to_leave_it_to_nccl() -> None:
    calls = {"all-gather": 1, "reduce-scatter": 1}
    for found, report in run_ranks(2, limited, timeout_s=120):
        assert found == calls
        assert report is not None
        assert f"NCCL ({LIMIT_VARIABLE}" in report
