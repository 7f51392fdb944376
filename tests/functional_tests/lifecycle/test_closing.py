"""Closing an engine: who waits is told and keeps what is booked; who comes later is refused."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.devices import Chaos, CpuDevice
from megatron_async.errors import EngineStopped, RankLost, RequestAborted
from tests.support.harness import TINY, Job, greedy, make_engine, random_prompts, run_together
from tests.support.patience import PATIENCE_S

PROMPTS = random_prompts(95, (7, 12, 4, 9), TINY.vocab_size)
STEPS = 9


@pytest.fixture(scope="module")
def expected(tiny_model: torch.nn.Module) -> list[list[int]]:
    engine = make_engine(tiny_model, lookahead=0)
    tokens = run_together(engine, [Job(prompt, greedy(40)) for prompt in PROMPTS])
    engine.close()
    return tokens


def check_has_what_is_booked(requests: list[Any], expected: list[list[int]], booked: int) -> None:
    assert [request.generated_length for request in requests] == [booked, booked, 0, 0]
    for request, tokens in zip(requests, expected, strict=True):
        assert request.generated_tokens == tokens[: request.generated_length]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_unfinished_requests_keep_their_tokens(
    tiny_model: torch.nn.Module, expected: list[list[int]], lookahead: int
) -> None:
    """Two run, two wait. Break `RequestRegistry.close`: no `_keep_booked_tokens`."""
    engine = make_engine(tiny_model, lookahead=lookahead, max_requests=2)
    futures = [engine.add_request(n, p, greedy(40)) for n, p in enumerate(PROMPTS)]
    for _ in range(STEPS):
        engine.step_modern()
    engine.close()
    requests = [future.result() for future in futures]
    assert all(isinstance(request.error, RequestAborted) for request in requests)
    check_has_what_is_booked(requests, expected, STEPS - lookahead)
    ended = engine.step_modern()["finished_request_records"]  # they are still reported
    assert ended == requests
    engine.close()  # again
    with pytest.raises(EngineStopped, match="the engine is closed: make a new"):
        engine.step_modern()


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_requests_of_a_lost_job_keep_their_tokens(
    tiny_model: torch.nn.Module, expected: list[list[int]], lookahead: int
) -> None:
    engine = make_engine(tiny_model, lookahead=lookahead, max_requests=2)
    futures = [engine.add_request(n, p, greedy(40)) for n, p in enumerate(PROMPTS)]
    for _ in range(STEPS):
        engine.step_modern()

    def lost(step: int, prefill_limit: int | None) -> None:
        raise RankLost("rank 1 died")

    engine.group.launching = lost  # type: ignore[method-assign]
    with pytest.raises(RankLost):
        engine.step_modern()
    requests = [future.result() for future in futures]
    assert all(isinstance(request.error, RankLost) for request in requests)
    check_has_what_is_booked(requests, expected, STEPS - lookahead)
    engine.close()


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_no_request_enters_a_closed_engine(
    tiny_model: torch.nn.Module, expected: list[list[int]], lookahead: int
) -> None:
    """Its runner ends in order, idle or in the middle of a wait. Break one of these, and it fails:

    - `add_request`: no `check_is_open`
    - `async_step`: book a step behind the end
    """

    async def two_steps(engine: DynamicInferenceEngine) -> None:
        await engine.async_step()
        await engine.async_step()

    async def main(busy: bool, seed: int = 0) -> None:
        device = CpuDevice(Chaos(seed=seed, probability=0.7, max_delay_s=0.003))
        engine = make_engine(tiny_model, device=device, lookahead=lookahead, max_requests=2)
        runner = asyncio.create_task(engine.run_engine())
        future = None
        if busy:
            future = engine.add_request(0, PROMPTS[0], greedy(400))
            stream = engine.stream(0)
            tokens = (await anext(stream)).tokens
            await asyncio.sleep(0.0005)
        else:
            await asyncio.sleep(0.01)
        engine.close()
        await asyncio.wait_for(runner, PATIENCE_S)
        with pytest.raises(EngineStopped, match="the engine is closed: make a new"):
            engine.add_request(1, PROMPTS[1], greedy(3))
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(
                two_steps(engine), PATIENCE_S
            )  # the first may report who was aborted
        with pytest.raises(EngineStopped):
            engine.resume()
        if future is not None:
            request = await asyncio.wait_for(future, PATIENCE_S)
            assert request.generated_tokens[: len(tokens)] == tokens
            assert isinstance(request.error, RequestAborted)
            with contextlib.suppress(RequestAborted):
                async for chunk in stream:
                    tokens += chunk.tokens
            assert tokens == request.generated_tokens
            assert tokens[:40] == expected[0][: len(tokens)]

    asyncio.run(main(busy=False))
    for seed in range(8):
        asyncio.run(main(busy=True, seed=seed))


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_closing_while_the_last_token_is_waited_for(
    tiny_model: torch.nn.Module, lookahead: int
) -> None:
    """Break `async_step`: book a step although the engine was closed meanwhile."""

    async def main(seed: int) -> bool:
        device = CpuDevice(Chaos(seed=seed, probability=1.0, max_delay_s=0.01))
        engine = make_engine(tiny_model, device=device, lookahead=lookahead, max_requests=2)
        future = engine.add_request(0, PROMPTS[0], greedy(1))
        if lookahead:
            await engine.async_step()  # the next one resolves it: nothing else is to be launched
        step = asyncio.create_task(engine.async_step())
        await asyncio.sleep(0)
        was_done = future.done()
        engine.close()
        ended = (await asyncio.wait_for(step, PATIENCE_S))["finished_request_records"]
        assert [r.error is None for r in ended] == [was_done]
        return was_done

    assert not all([asyncio.run(main(seed)) for seed in range(3)])
