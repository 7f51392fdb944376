"""Closing an engine: waiting callers are told, and keep what is booked; later ones are refused.
Aborts in every phase of a request's life, which nobody else notices. Calls of other threads, which
an engine at work refuses: it would serve them late or break over them."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, Status
from megatron_async.devices import Chaos, CpuDevice, Event
from megatron_async.errors import EngineStopped, RankLost, RequestAborted, WrongThread
from megatron_async.planning.request_slots import SlotState
from megatron_async.requests.inference_request import DynamicInferenceEventType
from tests.support.harness import (
    EngineFactory,
    Job,
    drain,
    greedy,
    make_engine,
    random_prompts,
    run_together,
)
from tests.support.patience import PATIENCE_S

PROMPTS = random_prompts(95, (7, 12, 4, 9))
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


def test_unfinished_requests_keep_their_tokens(tiny_model, expected: list[list[int]], lookahead):
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


def test_requests_of_a_lost_job_keep_their_tokens(tiny_model, expected: list[list[int]], lookahead):
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


def test_no_request_enters_a_closed_engine(tiny_model, expected: list[list[int]], lookahead):
    """A closed engine's runner ends, idle or in the middle of a wait. Break one of these, and it
    fails:

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
            # The first may report aborts.
            await asyncio.wait_for(two_steps(engine), PATIENCE_S)
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


def test_closing_while_the_last_token_is_waited_for(tiny_model, lookahead):
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


VICTIM, OTHERS = 2, (0, 1)
TOKENS = 24
THREE = random_prompts(21, (9, 14, 40))


def state(engine: DynamicInferenceEngine) -> SlotState | None:
    """State of the victim's slot; None without one."""
    slots, request = engine.context.slots, engine.get_request(VICTIM)
    if request not in slots.requests:
        return None
    return SlotState(int(slots.state[slots.requests.index(request)]))


def is_evicted(engine: DynamicInferenceEngine) -> bool:
    events = [event.type for event in engine.get_request(VICTIM).events]
    return state(engine) is None and DynamicInferenceEventType.EVICT in events


def booked(engine: DynamicInferenceEngine) -> int:
    slots, request = engine.context.slots, engine.get_request(VICTIM)
    return len(slots.generated_tokens(slots.requests.index(request)))


def is_finishing(engine: DynamicInferenceEngine) -> bool:
    """All its tokens are launched, the last of them in flight or about to be booked."""
    if state(engine) != SlotState.DECODING:
        return False
    slots = engine.context.slots
    slot = slots.requests.index(engine.get_request(VICTIM))
    return bool(slots.at_least(slot) >= slots.max_length[slot] - 1)


CRAMPED = {"num_kv_blocks": 9, "block_size_tokens": 8}
PHASES: dict[str, tuple[Callable[[DynamicInferenceEngine], bool], dict[str, float]]] = {
    "waiting": (lambda e: state(e) is None and e.stats()["steps"] > 2, {"max_requests": 2}),
    "prefilling": (lambda e: state(e) == SlotState.PREFILLING, {"max_tokens": 16}),
    "first token": (lambda e: state(e) == SlotState.DECODING and booked(e) <= 1, {}),
    "decoding": (lambda e: state(e) == SlotState.DECODING and booked(e) > 5, {}),
    "finishing": (is_finishing, {}),
    "paused": (lambda e: state(e) == SlotState.PAUSED, CRAMPED),
    "evicted": (is_evicted, CRAMPED | {"paused_buffer_size_gb": 1e-9}),
}


@pytest.mark.parametrize("phase", PHASES)
def test_abort(make_tiny_engine: EngineFactory, phase: str, lookahead: int) -> None:
    reached, settings = PHASES[phase]
    plain = make_tiny_engine(lookahead=0)
    expected = [r.generated_tokens for r in plain.generate(THREE, greedy(TOKENS))]
    engine = make_tiny_engine(lookahead=lookahead, **settings)
    futures = [engine.add_request(i, THREE[i], greedy(TOKENS)) for i in range(3)]
    while not reached(engine):
        engine.step_modern()
    engine.abort_request(VICTIM)
    victim = futures[VICTIM].result()
    assert victim.status == Status.FAILED
    assert isinstance(victim.error, RequestAborted)
    assert victim.generated_tokens == expected[VICTIM][: len(victim.generated_tokens)]
    with pytest.raises(KeyError):
        engine.abort_request(VICTIM)
    # The id is free at once, also while rows of its last owner are in flight.
    again = engine.add_request(VICTIM, THREE[VICTIM], greedy(TOKENS))
    drain(engine)
    assert [futures[i].result().generated_tokens for i in OTHERS] == [expected[i] for i in OTHERS]
    assert again.result().generated_tokens == expected[VICTIM]
    with pytest.raises(KeyError):
        engine.abort_request(VICTIM)


TWO = random_prompts(91, (7, 5))

CALLS: dict[str, Callable[[DynamicInferenceEngine], Any]] = {
    "add_request": lambda engine: engine.add_request(1, TWO[1], greedy(3)),
    "abort_request": lambda engine: engine.abort_request(0),
    "stream": lambda engine: engine.stream(0),
    "step_modern": lambda engine: engine.step_modern(),
    "launch_step": lambda engine: engine.launch_step(),
    "resolve_step": lambda engine: engine.resolve_step(),
    "async_step": lambda engine: asyncio.run(engine.async_step()),
    "run_engine": lambda engine: asyncio.run(engine.run_engine()),
    "generate": lambda engine: engine.generate([TWO[1]], greedy(3)),
    "pause": lambda engine: engine.pause(),
    "unpause": lambda engine: engine.unpause(),
    "suspend": lambda engine: engine.suspend(),
    "resume": lambda engine: engine.resume(),
}


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
                future = engine.add_request(0, TWO[0], greedy(12))
                await engine.stream(0).__anext__()
            message = await asyncio.to_thread(refused)
            assert threading.current_thread().name in message
            assert "loop.call_soon_threadsafe" in message
        assert not engine.is_stopped
        assert (await asyncio.wait_for(future, PATIENCE_S)).generated_length == 12
        runner.cancel()

    asyncio.run(main())
    drain(engine)


def test_what_the_message_advises(make_tiny_engine: EngineFactory, lookahead: int) -> None:
    engine = make_tiny_engine(lookahead=lookahead)

    async def ask(number: int) -> list[int]:
        return (await engine.add_request(number, TWO[0], greedy(6))).generated_tokens

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
            pool.submit(engine.add_request, 1, TWO[1], greedy(3)).result(20)
        refusals += 1

    assert engine.generate([TWO[0]], greedy(4), on_step)[0].generated_length == 4
    assert refusals >= 4
    wait = engine.group.wait

    def look(event: Event) -> None:
        on_step({})
        wait(event)

    engine.group.wait = look  # type: ignore[method-assign]
    engine.add_request(0, TWO[0], greedy(3))
    drain(engine)
    assert refusals >= 7


def test_threads_may_take_turns(make_tiny_engine: EngineFactory, lookahead: int) -> None:
    """An engine belongs to the threads that work with it, one after the other."""
    engine = make_tiny_engine(lookahead=lookahead)
    expected = engine.generate(TWO, greedy(6))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(engine.generate, TWO, greedy(6)).result(20)
    assert [r.generated_tokens for r in found] == [r.generated_tokens for r in expected]
    drain(engine)
    check_idle_after_an_error(engine)


def check_idle_after_an_error(engine: DynamicInferenceEngine) -> None:
    """A thread that left with an error has left."""

    def fails(report: dict[str, Any]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate([TWO[0]], greedy(4), fails)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(drain, engine).result(20)
