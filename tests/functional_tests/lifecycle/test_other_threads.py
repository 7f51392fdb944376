"""An engine at work refuses calls of other threads, which it would serve late or break over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine
from megatron_async.devices import Event
from megatron_async.errors import WrongThread
from tests.support.harness import TINY, EngineFactory, drain, greedy, random_prompts
from tests.support.patience import PATIENCE_S

PROMPTS = random_prompts(91, (7, 5), TINY.vocab_size)

CALLS: dict[str, Callable[[DynamicInferenceEngine], Any]] = {
    "add_request": lambda engine: engine.add_request(1, PROMPTS[1], greedy(3)),
    "abort_request": lambda engine: engine.abort_request(0),
    "stream": lambda engine: engine.stream(0),
    "step_modern": lambda engine: engine.step_modern(),
    "launch_step": lambda engine: engine.launch_step(),
    "resolve_step": lambda engine: engine.resolve_step(),
    "async_step": lambda engine: asyncio.run(engine.async_step()),
    "run_engine": lambda engine: asyncio.run(engine.run_engine()),
    "generate": lambda engine: engine.generate([PROMPTS[1]], greedy(3)),
    "pause": lambda engine: engine.pause(),
    "unpause": lambda engine: engine.unpause(),
    "suspend": lambda engine: engine.suspend(),
    "resume": lambda engine: engine.resume(),
}


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_beside_run_engine(make_tiny_engine: EngineFactory, call: str, lookahead: int) -> None:
    """Refused at once, idle or busy, with a message that says how; and the thread's own go on."""
    engine = make_tiny_engine(lookahead=lookahead)

    def refused() -> str:
        with pytest.raises(WrongThread) as error:
            CALLS[call](engine)
        return str(error.value)

    async def main() -> None:
        runner = asyncio.create_task(engine.run_engine())
        await asyncio.sleep(0)
        for busy in (False, True):
            if busy:
                future = engine.add_request(0, PROMPTS[0], greedy(12))
                await engine.stream(0).__anext__()
            message = await asyncio.to_thread(refused)
            assert threading.current_thread().name in message
            assert "loop.call_soon_threadsafe" in message
        assert not engine.is_stopped
        assert (await asyncio.wait_for(future, PATIENCE_S)).generated_length == 12
        runner.cancel()

    asyncio.run(main())
    drain(engine)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_what_the_message_advises(make_tiny_engine: EngineFactory, lookahead: int) -> None:
    engine = make_tiny_engine(lookahead=lookahead)

    async def ask(number: int) -> list[int]:
        return (await engine.add_request(number, PROMPTS[0], greedy(6))).generated_tokens

    async def main() -> None:
        runner = asyncio.create_task(engine.run_engine())
        loop = asyncio.get_running_loop()

        def other(number: int) -> list[int]:
            return asyncio.run_coroutine_threadsafe(ask(number), loop).result(20)

        found = await asyncio.gather(*(asyncio.to_thread(other, number) for number in range(3)))
        assert len(found[0]) == 6
        assert found == [found[0]] * 3
        runner.cancel()

    asyncio.run(main())
    drain(engine)


def test_a_step_and_generate_under_way(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine()
    refusals = 0

    def on_step(report: dict[str, Any]) -> None:
        nonlocal refusals
        with ThreadPoolExecutor(1) as pool, pytest.raises(WrongThread):
            pool.submit(engine.add_request, 1, PROMPTS[1], greedy(3)).result(20)
        refusals += 1

    assert engine.generate([PROMPTS[0]], greedy(4), on_step)[0].generated_length == 4
    assert refusals >= 4
    wait = engine.group.wait

    def look(event: Event) -> None:
        on_step({})
        wait(event)

    engine.group.wait = look  # type: ignore[method-assign]
    engine.add_request(0, PROMPTS[0], greedy(3))
    drain(engine)
    assert refusals >= 7


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_threads_may_take_turns(make_tiny_engine: EngineFactory, lookahead: int) -> None:
    """An engine belongs to whoever works with it, one after the other."""
    engine = make_tiny_engine(lookahead=lookahead)
    expected = engine.generate(PROMPTS, greedy(6))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(engine.generate, PROMPTS, greedy(6)).result(20)
    assert [r.generated_tokens for r in found] == [r.generated_tokens for r in expected]
    drain(engine)
    check_idle_after_an_error(engine)


def check_idle_after_an_error(engine: DynamicInferenceEngine) -> None:
    """Whoever left with an error has left."""

    def fails(report: dict[str, Any]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate([PROMPTS[0]], greedy(4), fails)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(drain, engine).result(20)
