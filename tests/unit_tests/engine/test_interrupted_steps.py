"""Steps that are cut short: cancelled, interrupted, or taken by two coroutines at once.

A chaotic device makes waits long, so that they are met in the middle.
"""

import asyncio

import pytest

from megatron_async.devices import Chaos, CpuDevice
from megatron_async.errors import EngineStopped
from tests.support.harness import fail_call
from tests.unit_tests.engine.engines_under_test import GREEDY, PROMPTS


@pytest.fixture(params=[0, 1, 2])
def engine(request, make_engine):
    chaos = Chaos(seed=request.param, probability=0.7, max_delay_s=0.003)
    return make_engine(lookahead=request.param, device=CpuDevice(chaos))


def in_flight_allowed(engine):
    return len(engine.in_flight) <= engine.lookahead + 1


def tokens(futures):
    return [future.result().generated_tokens for future in futures]


def test_a_cancelled_async_step_changes_no_token(engine, expected):
    async def main():
        futures = [engine.add_request(i, prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
        cancelled = 0
        while not all(future.done() for future in futures):
            step = asyncio.create_task(engine.async_step())
            await asyncio.sleep(0.0005)
            cancelled += step.cancel()
            await asyncio.gather(step, return_exceptions=True)
            assert in_flight_allowed(engine)
        assert cancelled > 5
        return tokens(futures)

    assert asyncio.run(main()) == expected


def test_a_keyboard_interrupt_in_the_wait_changes_no_token(engine, expected):
    fail_call(engine.group, "wait", lambda call: call % 3, KeyboardInterrupt)
    futures = [engine.add_request(i, prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    interrupts = 0
    while engine.has_unfinished_requests():
        try:
            engine.step_modern()
        except KeyboardInterrupt:
            interrupts += 1
        assert in_flight_allowed(engine)
    assert interrupts > 5
    assert tokens(futures) == expected


def test_two_coroutines_may_step_one_engine(engine, expected):
    async def main():
        futures = [engine.add_request(i, prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]

        async def drive():
            while not all(future.done() for future in futures):
                await engine.async_step()
                assert in_flight_allowed(engine)

        await asyncio.gather(drive(), drive(), drive())
        return tokens(futures)

    assert asyncio.run(main()) == expected


def test_generate_inside_a_running_loop_beside_async_step(engine, expected):
    async def main():
        futures = [engine.add_request(100 + i, PROMPTS[i], GREEDY) for i in (0, 1)]
        step = asyncio.create_task(engine.async_step())
        await asyncio.sleep(0.0002)
        done = engine.generate([PROMPTS[3]], GREEDY)
        await step
        while not all(future.done() for future in futures):
            await engine.async_step()
        return [*tokens(futures), done[0].generated_tokens]

    assert asyncio.run(main()) == [expected[0], expected[1], expected[3]]


def test_a_closed_engine_says_so(make_engine):
    engine = make_engine()
    engine.generate([[1]], GREEDY)
    engine.close()
    for call in (lambda: engine.add_request(5, [1], GREEDY), engine.step_modern, engine.pause):
        with pytest.raises(EngineStopped, match="the engine is closed: make a new engine"):
            call()
