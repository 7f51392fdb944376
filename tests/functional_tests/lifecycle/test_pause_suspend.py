"""An engine can be stopped and go on at any time, and no token changes."""

import asyncio
import random
import weakref
from collections import Counter
from typing import Any

import psutil
import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.devices import Chaos, CpuDevice
from megatron_async.engine.pausing import EngineState
from megatron_async.errors import EngineStopped, OutOfMemoryError, RequestAborted
from megatron_async.planning.request_slots import SlotState
from tests.support.capturing_cpu import CapturingCpu
from tests.support.harness import (
    EngineFactory,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
)
from tests.support.patience import PATIENCE_S
from tests.support.ranks import run_ranks

TOKENS = 40
PROMPTS = random_prompts(5, (3, 40, 11, 1, 26))
PARAMS = [
    greedy(TOKENS),
    greedy(TOKENS, temperature=0.8, top_k=20, seed=3),
    greedy(TOKENS),
    greedy(TOKENS, temperature=1.0, seed=4),
    greedy(TOKENS),
]


def pause(engine: DynamicInferenceEngine) -> None:
    engine.pause()
    assert engine.state == EngineState.PAUSED


def suspend(engine: DynamicInferenceEngine) -> None:
    assert engine.suspend() == 0
    assert engine.state == EngineState.SUSPENDED


def suspend_and_free(engine: DynamicInferenceEngine) -> None:
    view = engine.context.gpu_view
    states = view.states.num_bytes(engine.context.max_requests)
    assert engine.suspend(free_kv_cache=True) == view.kv_cache.num_bytes + states
    assert engine.context.slots.num_free == engine.context.max_requests


STOPS = {"pause": pause, "suspend": suspend, "suspend and free": suspend_and_free}
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_tokens": 16},
    "pauses": {"num_kv_blocks": 22, "block_size_tokens": 4},
    "evictions": {"num_kv_blocks": 22, "block_size_tokens": 4, "paused_buffer_size_gb": 1e-9},
}


def go_on(engine: DynamicInferenceEngine) -> None:
    engine.unpause()
    engine.resume()
    assert engine.state == EngineState.RUNNING


def phases(engine: DynamicInferenceEngine) -> set[str]:
    """What a stop meets."""
    context = engine.context
    found = {SlotState(int(state)).name for state in context.slots.state}
    found |= {"in flight"} if engine.in_flight else set()
    waiting = [context.waiting.first()] if len(context.waiting) else []
    return found | {"evicted" for each in waiting if each.generated_tokens}


@pytest.fixture(scope="module")
def expected(tiny_model: torch.nn.Module) -> list[list[int]]:
    engine = make_engine(tiny_model, lookahead=0, num_kv_blocks=256, max_requests=8)
    tokens = [request.generated_tokens for request in engine.generate(PROMPTS, PARAMS)]
    engine.close()
    return tokens


@pytest.mark.parametrize("settings", SETTINGS)
def test_stops_in_every_phase(make_tiny_engine, expected, lookahead, settings: str):
    met: Counter[str] = Counter()
    for seed, stop in enumerate(STOPS.values()):
        chooser = random.Random(seed)
        engine = make_tiny_engine(lookahead=lookahead, **SETTINGS[settings])
        futures = [
            engine.add_request(number, prompt, params)
            for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
        ]
        stops = 0
        streamed: list[list[int]] = [[] for _ in PROMPTS]
        while engine.has_unfinished_requests():
            for _ in range(chooser.randint(4, 9)):  # enough to prefill a prompt again
                for output in engine.step_modern()["outputs"]:
                    for number, token in zip(output.token_request_ids, output.tokens, strict=True):
                        streamed[number].append(int(token))
            met.update(phases(engine))
            stop(engine)
            stops += 1
            assert not engine.in_flight
            engine.context.check_integrity()
            go_on(engine)
        assert [future.result().generated_tokens for future in futures] == expected
        assert streamed == expected, "each token is reported once, in order"
        stats = engine.stats()
        assert stats["engine_pauses"] + stats["engine_suspends"] == stops > 3
        if settings == "roomy":
            assert stats["overlap_ratio"] == (1.0 if lookahead else 0.0)
    wanted = {
        "roomy": {"DECODING"},
        "chunks": {"PREFILLING", "DECODING"},
        "pauses": {"PAUSED", "DECODING"},
        "evictions": {"evicted", "DECODING"},
    }[settings]
    assert set(met) >= (wanted | {"in flight"} if lookahead else wanted), met


def test_streams_while_a_coroutine_stops_the_engine(tiny_model, expected, lookahead):
    """Delays make sure that stops meet `run_engine` in its waits."""
    device = CpuDevice(Chaos(lookahead, probability=0.3, max_delay_s=0.001))
    engine = make_engine(
        tiny_model, device=device, lookahead=lookahead, num_kv_blocks=64, max_requests=8
    )
    chooser = random.Random(lookahead)

    async def read(number: int) -> list[int]:
        return [token async for chunk in engine.stream(number) for token in chunk.tokens]

    async def stop_now_and_then() -> int:
        stops = 0
        while engine.context.has_unfinished_requests():
            chooser.choice(list(STOPS.values()))(engine)
            stops += 1
            booked = engine.statistics.generated_tokens
            await asyncio.sleep(chooser.choice([0, 0.001]))
            assert engine.statistics.generated_tokens == booked
            go_on(engine)
            await asyncio.sleep(chooser.choice([0.004, 0.008]))
        return stops

    async def main() -> tuple[list[list[int]], int]:
        runner = asyncio.create_task(engine.run_engine())
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(number, prompt, params)
        readers = [asyncio.create_task(read(number)) for number in range(len(PROMPTS))]
        stops = await asyncio.wait_for(stop_now_and_then(), PATIENCE_S)
        tokens = [await asyncio.wait_for(reader, PATIENCE_S) for reader in readers]
        runner.cancel()
        return tokens, stops

    tokens, stops = asyncio.run(main())
    assert tokens == expected
    assert stops > 3
    drain(engine)
    assert_all_is_back(engine)
    assert engine.stats()["overlap_ratio"] == (1.0 if lookahead else 0.0)


@pytest.mark.parametrize("stop", STOPS)
def test_adding_and_aborting_while_stopped(make_tiny_engine, expected, lookahead, stop: str):
    """Aborted are one that runs and one that waits; added are a new one and one of them again."""
    engine = make_tiny_engine(lookahead=lookahead, max_requests=2)
    futures = {i: engine.add_request(i, PROMPTS[i], PARAMS[i]) for i in range(4)}
    for _ in range(5):
        engine.step_modern()
    STOPS[stop](engine)
    aborted = [futures.pop(i) for i in (1, 3)]
    for number in (1, 3):
        engine.abort_request(number)
    for future, number in zip(aborted, (1, 3), strict=True):
        request = future.result()
        assert isinstance(request.error, RequestAborted)
        assert request.generated_tokens == expected[number][: len(request.generated_tokens)]
    for number in (1, 4):
        futures[number] = engine.add_request(number, PROMPTS[number], PARAMS[number])
    report = engine.step_modern()  # there is something to report
    assert [request.request_id for request in report["finished_request_records"]] == [1, 3]
    with pytest.raises(EngineStopped, match=r"launches no step: call (unpause|resume)\(\) first"):
        engine.step_modern()
    with pytest.raises(EngineStopped):
        engine.generate([[1]], greedy(1))
    assert engine.has_unfinished_requests()
    go_on(engine)
    drain(engine)
    for number, future in futures.items():
        assert future.result().generated_tokens == expected[number]


@pytest.mark.parametrize("stop", STOPS)
def test_closing_while_stopped(tiny_model: torch.nn.Module, stop: str) -> None:
    engine = make_engine(tiny_model, num_kv_blocks=64, max_requests=2)

    async def main() -> None:
        runner = asyncio.create_task(engine.run_engine())
        futures = [engine.add_request(i, PROMPTS[i], greedy(300)) for i in range(3)]
        while engine.statistics.generated_tokens < 5:
            await asyncio.sleep(0)
        STOPS[stop](engine)
        await asyncio.sleep(0)
        engine.close()
        for future in futures:
            assert "closed" in str((await asyncio.wait_for(future, PATIENCE_S)).error)
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)

    asyncio.run(main())
    with pytest.raises(EngineStopped, match="the engine is closed: make a new engine"):
        engine.generate([[1]], greedy(1))


def test_each_call_twice_and_both_stops_together(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine()
    future = engine.add_request(0, PROMPTS[0], greedy(6))
    engine.unpause()
    engine.resume()
    engine.step_modern()
    for _ in range(2):
        engine.pause()
    assert engine.suspend() == 0
    assert engine.suspend(free_kv_cache=True) > 0  # more than before
    assert engine.suspend(free_kv_cache=True) == 0  # it is gone
    assert engine.state == EngineState.SUSPENDED
    with pytest.raises(EngineStopped, match=r"suspended .* call unpause\(\) and resume\(\) first"):
        engine.generate([[1]], greedy(1))
    for _ in range(2):
        engine.resume()
    assert engine.state == EngineState.PAUSED
    assert not future.done()
    for _ in range(2):
        engine.unpause()
    drain(engine)
    assert len(future.result().generated_tokens) == 6
    stats = engine.stats()
    assert (stats["engine_pauses"], stats["engine_suspends"]) == (1, 1)


def test_one_coroutine_waits_while_another_stops(make_tiny_engine: EngineFactory) -> None:
    """A stopped `async_step` waits, tells of an abort at once, and goes on when the engine does."""
    engine = make_tiny_engine()

    async def main() -> None:
        futures = [engine.add_request(i, PROMPTS[i], greedy(8)) for i in range(2)]
        engine.pause()
        step = asyncio.create_task(engine.async_step())
        await asyncio.sleep(0.01)
        assert not step.done()
        engine.abort_request(1)
        report = await asyncio.wait_for(step, PATIENCE_S)
        assert [request.request_id for request in report["finished_request_records"]] == [1]
        step = asyncio.create_task(engine.async_step())
        await asyncio.sleep(0.01)
        assert not step.done()
        assert engine.stats()["steps"] == 0
        engine.unpause()
        await asyncio.wait_for(step, PATIENCE_S)
        while not futures[0].done():
            await engine.async_step()

    asyncio.run(main())
    drain(engine)


def test_a_stream_sees_what_a_pause_books(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine(lookahead=2)

    async def main() -> None:
        engine.add_request(0, PROMPTS[0], greedy(8))
        stream = engine.stream(0)
        first = asyncio.create_task(anext(stream))
        for _ in range(2):
            await engine.async_step()
        assert len(engine.in_flight) == 2
        await asyncio.sleep(0.01)
        assert not first.done()
        engine.pause()
        assert len((await asyncio.wait_for(first, PATIENCE_S)).tokens) == 2
        engine.unpause()

    asyncio.run(main())
    drain(engine)


def test_an_engine_serves_event_loops_one_after_another(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine()

    async def main() -> None:
        runner = asyncio.create_task(engine.run_engine())
        await engine.add_request(0, PROMPTS[0], greedy(3))
        await asyncio.sleep(0.01)  # the runner waits for the next request
        runner.cancel()

    for _ in range(2):
        asyncio.run(main())
    drain(engine)


def _release_a_cache() -> float:
    """Share of the cache's bytes that the process gives back."""
    engine = make_engine(make_model(), num_kv_blocks=1500, block_size_tokens=256, max_requests=2)
    cache = engine.context.gpu_view.kv_cache
    assert cache._data is not None
    cache._data.fill_(1.0)
    alive = weakref.ref(cache._data)
    resident = psutil.Process().memory_info().rss
    freed = engine.suspend(free_kv_cache=True)
    assert alive() is None
    assert freed >= cache.num_bytes > 90 << 20
    given_back = resident - psutil.Process().memory_info().rss
    engine.resume()
    engine.generate([PROMPTS[0]], greedy(3))
    engine.close()
    return given_back / freed


def test_a_released_cache_is_gone() -> None:
    """In a process of its own: in one with much free memory the cache may lie in its middle."""
    assert run_ranks(1, _release_a_cache)[0] > 0.9


def test_no_memory_to_resume_with(make_tiny_engine, expected: list[list[int]], monkeypatch):
    engine = make_tiny_engine()
    future = engine.add_request(0, PROMPTS[0], PARAMS[0])
    engine.step_modern()
    engine.suspend(free_kv_cache=True)
    monkeypatch.setattr(engine.context.device, "free_memory", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match=r"resuming needs .* free memory there and call"):
        engine.resume()
    assert engine.state == EngineState.SUSPENDED
    monkeypatch.undo()
    engine.resume()
    drain(engine)
    assert future.result().generated_tokens == expected[0]


def test_graphs_are_captured_again(make_tiny_engine, expected: list[list[int]]):
    engine = make_tiny_engine(device=CapturingCpu())
    graphs = engine.controller.graphs
    count = graphs.count
    assert count > 0
    futures = [engine.add_request(i, PROMPTS[i], PARAMS[i]) for i in range(len(PROMPTS))]
    for free in (True, False, True):
        for _ in range(4):
            engine.step_modern()
        engine.suspend(free_kv_cache=free)
        assert graphs.count == (0 if free else count)
        engine.resume()
        assert graphs.count == count
    before = engine.stats()["captured_steps"]
    drain(engine)
    assert engine.stats()["captured_steps"] > before
    assert [future.result().generated_tokens for future in futures] == expected
