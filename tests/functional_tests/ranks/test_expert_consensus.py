"""Ranks with requests of their own launch every step together, in one shape, and stop together: an
engine that is stopped steps on for the experts that other ranks need."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.devices import CpuDevice
from megatron_async.ranks import finishing
from megatron_async.ranks.actions import Report, Turn
from megatron_async.ranks.expert_consensus import SharedExperts
from megatron_async.ranks.join_group import RankPlace
from megatron_async.ranks.leader import Leader
from tests.support.capturing_cpu import CapturingCpu
from tests.support.harness import (
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
)
from tests.support.late_device import LateDevice
from tests.support.memory_channel import BesideOthers, FollowingEngine, MemoryCommunicator
from tests.support.patience import PATIENCE_S

MODEL = make_model()
PROMPTS = random_prompts(5, (3, 40, 11, 1, 26))


class NoFollowers:
    """The channel of a leader alone."""

    members = (0,)

    def send(self, message: Turn) -> None: ...

    def receive(self, timeout_s: float | None = None) -> Turn:
        raise AssertionError("nobody sends")

    def report(self, message: Report) -> None: ...

    def reports(self) -> list[tuple[int, Report]]:
        return []

    def close(self) -> None: ...


class ExpertRanks:
    """Engines that agree on steps, each driven by a thread; `shapes` of each rank's launched steps
    are (graph key or tokens, dispatch tokens, rows)."""

    model: Callable[[], torch.nn.Module] = staticmethod(lambda: MODEL)

    def __init__(self, size: int, captures: bool = False, **config: Any) -> None:
        self.engines: list[DynamicInferenceEngine] = []
        self.shapes: list[list[tuple[Any, int, int]]] = [[] for _ in range(size)]
        for rank, communicator in enumerate(MemoryCommunicator.group(size)):
            device = CapturingCpu() if captures else CpuDevice()
            engine = make_engine(self.model(), device=device, num_kv_blocks=32, **config)
            leader = Leader(NoFollowers(), lambda: None)
            engine.loop.join(SharedExperts(leader, communicator))
            self._watch(engine, self.shapes[rank])
            self.engines.append(engine)

    @staticmethod
    def _watch(engine: DynamicInferenceEngine, shapes: list[tuple[Any, int, int]]) -> None:
        launch = engine.controller.enqueue_step

        def watched(plan: Any) -> Any:
            dims = plan.dims
            key = dims.graph_key if dims.is_captured else None
            shapes.append((key, max(dims.tokens, dims.dispatch_tokens), plan.num_rows))
            return launch(plan)

        engine.controller.enqueue_step = watched  # type: ignore[method-assign]

    def run(self, *work: Callable[[DynamicInferenceEngine], Any]) -> list[Any]:
        """Call `work[rank](engine)` on a thread for each rank."""
        results: list[Any] = [None] * len(work)
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            try:
                results[rank] = work[rank](self.engines[rank])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise errors[0]
        return results

    def check(self) -> None:
        """All launched the same shapes, and nothing is left."""
        keys = [[shape[:2] for shape in shapes] for shapes in self.shapes]
        assert all(other == keys[0] for other in keys)
        assert all(any(rows for _, _, rows in step) for step in zip(*self.shapes, strict=True))
        for engine in self.engines:
            assert_all_is_back(engine)
            engine.close()


def alone(prompts: list[list[int]], params: Any) -> list[list[int]]:
    engine = make_engine(MODEL, num_kv_blocks=32)
    tokens = [output.generated_tokens for output in engine.generate(prompts, params)]
    engine.close()
    return tokens


def generate(prompts: list[list[int]], params: Any) -> Callable[[DynamicInferenceEngine], Any]:
    def call(engine: DynamicInferenceEngine) -> list[list[int]]:
        outputs = engine.generate(prompts, params)
        assert all(output.error is None for output in outputs)
        return [output.generated_tokens for output in outputs]

    return call


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
def test_different_requests_in_one_shape(lookahead, captures):
    ranks = ExpertRanks(3, captures, lookahead=lookahead, max_requests=4, max_tokens=16)
    first, second = greedy(20), greedy(7, return_log_probs=True)
    results = ranks.run(
        generate(PROMPTS, first), generate(PROMPTS[3:], second), generate([], greedy(1))
    )
    assert results == [alone(PROMPTS, first), alone(PROMPTS[3:], second), []]
    statistics = [engine.statistics for engine in ranks.engines]
    assert statistics[2].dummy_steps == statistics[2].steps == statistics[0].steps
    assert statistics[0].dummy_steps < statistics[1].dummy_steps
    assert all(entry.zombie_steps == 0 for entry in statistics)
    ranks.check()


def test_twice_and_with_nothing_to_do_anywhere():
    ranks = ExpertRanks(2)
    for _ in range(2):
        ranks.run(generate([], greedy(1)), generate([PROMPTS[0]], greedy(3)))
        ranks.run(generate([], greedy(1)), generate([], greedy(1)))
    ranks.check()


def test_idle_engines_wake_when_another_has_work():
    """Served by event loops: a rank without work sleeps, and one with work wakes it."""
    ranks = ExpertRanks(2, lookahead=1)
    done = threading.Barrier(2)

    def serve(numbers: range) -> Callable[[DynamicInferenceEngine], Any]:
        async def run(engine: DynamicInferenceEngine) -> list[Any]:
            loop = asyncio.create_task(engine.run_engine())
            tokens = []
            for number in numbers:
                await asyncio.sleep(0.03)
                request = await engine.add_request(number, PROMPTS[number], greedy(6))
                tokens.append(request.generated_tokens)
            while done.n_waiting == 0 and numbers.start == 0:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(done.wait, 20)
            await asyncio.sleep(0.1)
            loop.cancel()
            return tokens

        return lambda engine: asyncio.run(run(engine))

    results = ranks.run(serve(range(3)), serve(range(3, 4)))
    assert results == [alone(PROMPTS[:3], greedy(6)), alone(PROMPTS[3:4], greedy(6))]
    ranks.check()


def test_all_stop_together_and_go_on():
    _stop_together(ExpertRanks(2, lookahead=2))


def test_followers_stop_with_their_leaders():
    """Each of two models that share experts lies on two ranks."""
    ranks = ExpertRanks(2, lookahead=1)
    pairs = []
    for leader in ranks.engines:
        pair = FollowingEngine(
            leader, make_engine(MODEL, num_kv_blocks=32, lookahead=1), leader.group._communicator
        )
        pairs.append(pair)
    _stop_together(ranks)
    for pair in pairs:
        pair.join()
        assert pair.error is None, pair.error
        assert_all_is_back(pair.engine)
        pair.engine.close()


def _stop_together(ranks: ExpertRanks) -> None:
    def work(count: int) -> Callable[[DynamicInferenceEngine], Any]:
        def call(engine: DynamicInferenceEngine) -> Any:
            future = engine.add_request(0, PROMPTS[0], greedy(30))
            engine.group.begin_together()
            for _ in range(count):
                engine.step_modern()
            engine.pause()
            assert not engine.in_flight
            tokens = engine.context.slots.num_known[0]
            engine.unpause()
            engine.group.begin_together()
            drain(engine)
            return tokens, future.result().generated_tokens

        return call

    (early, first), (late, second) = ranks.run(work(4), work(9))
    assert early < late
    assert [first] == [second] == alone(PROMPTS[:1], greedy(30))
    ranks.check()


STOP_PROMPTS = random_prompts(5, (3, 40, 11))
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
def test_tokens_of_steps_in_flight_are_kept(tiny_model, lookahead, steps: int):
    engine = make_engine(
        tiny_model, device=LateDevice(), lookahead=lookahead, max_requests=4,
        max_sequence_length=128, max_tokens=48,
    )  # fmt: skip
    expected = [request.generated_tokens for request in engine.generate(STOP_PROMPTS, PARAMS)]
    engine.loop.join(group := BesideOthers(steps))
    loop = asyncio.new_event_loop()

    async def serve() -> list[list[int]]:
        futures = [
            engine.add_request(number, prompt, params)
            for number, (prompt, params) in enumerate(zip(STOP_PROMPTS, PARAMS, strict=True))
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
    steps, and a caller that waits until nothing is left would wait for ever."""

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


def test_who_ends_has_reported_all_before(idle: DynamicInferenceEngine, monkeypatch):
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
