"""An engine that is stopped while it waits for samples, and must step on for the experts that other
ranks need."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.ranks import finishing
from megatron_async.ranks.join_group import RankPlace
from tests.support.beside_others import BesideOthers
from tests.support.harness import TINY, assert_all_is_back, greedy, make_engine, random_prompts
from tests.support.late_device import LateDevice
from tests.support.patience import PATIENCE_S

PROMPTS = random_prompts(5, (3, 40, 11), TINY.vocab_size)
PARAMS = [greedy(12), greedy(12, temperature=0.8, seed=3), greedy(12)]
FIRST_STOP = 2
"""Steps before the first stop."""


async def step_and_stop(engine: DynamicInferenceEngine) -> None:
    """Step to the end of all requests; from the third step on, each that waits is stopped."""
    steps = 0
    while engine.has_unfinished_requests():
        step = asyncio.create_task(engine.async_step())
        await asyncio.sleep(0)  # it launches, and waits if it has to
        steps += 1
        if steps > FIRST_STOP and not step.done():
            engine.pause()
            engine.unpause()
        await step


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_tokens_of_steps_in_flight_are_kept(
    tiny_model: torch.nn.Module, lookahead: int, steps: int
) -> None:
    engine = make_engine(
        tiny_model, device=LateDevice(), lookahead=lookahead, max_requests=4,
        max_sequence_length=128, max_tokens=48,
    )  # fmt: skip
    expected = [request.generated_tokens for request in engine.generate(PROMPTS, PARAMS)]
    engine.loop.join(group := BesideOthers(steps))
    loop = asyncio.new_event_loop()

    async def serve() -> list[list[int]]:
        futures = [
            engine.add_request(number, prompt, params)
            for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
        ]
        await step_and_stop(engine)
        return [future.result().generated_tokens for future in futures]

    assert loop.run_until_complete(serve()) == expected
    assert group.launched > 2 * steps
    assert_all_is_back(engine)
    engine.close()
    loop.close()


@pytest.fixture
def idle(tiny_model: torch.nn.Module) -> Iterator[DynamicInferenceEngine]:
    """An engine without requests, beside others that run three steps more when it stops."""
    engine = make_engine(tiny_model, max_requests=4, max_sequence_length=128, max_tokens=48)
    engine.loop.join(BesideOthers(3))
    yield engine
    engine.close()


def test_an_idle_engine_reports_the_steps_of_its_stop(idle: DynamicInferenceEngine) -> None:
    """The loop of an idle engine sleeps until there is a request; nobody else reports these
    steps, and whoever waits until nothing is left would wait for ever."""

    async def stop() -> None:
        loop = asyncio.create_task(idle.run_engine())
        await asyncio.sleep(0.01)
        idle.pause()
        assert idle.booking.undelivered
        async with asyncio.timeout(PATIENCE_S):
            while idle.has_unfinished_requests():
                await asyncio.sleep(1e-3)
        idle.unpause()
        loop.cancel()
        await asyncio.wait([loop])

    asyncio.run(stop())


def test_who_ends_has_reported_all_before(
    idle: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that only reports asks the others for a round; those may be gone afterwards."""
    unreported: list[bool] = []

    class Job:
        def exchange(self, *_: Any) -> None:
            unreported.append(idle.has_unfinished_requests())

    monkeypatch.setattr(finishing, "join_job", Job)

    async def end() -> None:
        idle.pause()
        loop = asyncio.create_task(idle.run_engine())
        await finishing.finish_together(idle.has_unfinished_requests, RankPlace(0, 1))
        loop.cancel()
        await asyncio.wait([loop])

    asyncio.run(end())
    assert unreported == [False]
