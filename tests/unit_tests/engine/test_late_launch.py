"""With late launches a request joins the very next launch, and the device does not wait."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine, InferenceConfig
from megatron_async.engine.late_launch import (
    BACK_OFF_US,
    GROWTH,
    HOST_MARGIN_US,
    MARGIN_SHARE,
    MARGIN_US,
    TICK_S,
    LateLaunch,
    launches_late,
)
from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import LengthDistribution, poisson_trace
from megatron_async.lab.device_times import MACHINES
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.simulator import Simulated, simulate
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.observe.statistics import EngineStatistics
from tests.support.harness import TINY, drain, greedy, make_engine, make_model, random_prompts
from tests.support.patience import PATIENCE_S
from tests.support.tiny_launches import TickingLaunches

SHAPE = ModelShape.of_architecture(DUMMY_SHAPES["llama-3.1-8b"], "bfloat16")
LONG_US = 10_000.0
MARGIN = MARGIN_US + MARGIN_SHARE * LONG_US


class Steps:
    """A `LateLaunch` and the steps it is told of; the clock moves by hand."""

    def __init__(self, captures_graphs: bool = True, shares_cores: bool = False) -> None:
        self.now_us, self.number = 0.0, 0
        self.device = SimpleNamespace(
            now_us=lambda: self.now_us, captures_graphs=captures_graphs, shares_cores=shares_cores
        )
        self.context: Any = SimpleNamespace(
            device=self.device,
            waiting=[],
            scheduler=SimpleNamespace(prefilling=[]),
            slots=SimpleNamespace(num_free=3),
        )
        self.in_flight: deque[Any] = deque()
        self.statistics = EngineStatistics()
        self.late = LateLaunch(self.context, self.in_flight, self.statistics)

    def launch(self, tokens: int = 4, is_captured: bool = True) -> None:
        dims = SimpleNamespace(
            decode_rows=4, tokens=tokens, width=1, is_captured=is_captured,
            is_decode_only=tokens == 4,
        )  # fmt: skip
        plan: Any = SimpleNamespace(step=self.number, dims=dims, sampling_mode=0)
        self.number += 1
        self.late.launching(plan)
        ready = SimpleNamespace(query=lambda: False, wait=lambda: None)
        self.in_flight.append(SimpleNamespace(plan=plan, error=None, ready=ready))
        self.late.launched(plan)

    def end(self, after_us: float, error: Exception | None = None) -> None:
        self.now_us += after_us
        step = self.in_flight.popleft()
        step.error = error
        self.late.resolved(step)

    def run(self, *times_us: float) -> None:
        """Steps of one shape, launched ahead, that take so long; one more is in flight then."""
        if not self.in_flight:
            self.launch()
        for time_us in times_us:
            self.launch()
            self.end(time_us)

    @property
    def left_us(self) -> float:
        return 1e6 * self.late.seconds_left()


def test_a_launch_waits_until_the_running_step_is_nearly_done() -> None:
    steps = Steps()
    steps.launch()
    assert steps.left_us == 0, "a new shape"
    steps.run(LONG_US)
    assert steps.left_us == pytest.approx(LONG_US - MARGIN)
    steps.now_us += 3000
    assert steps.left_us == pytest.approx(LONG_US - MARGIN - 3000)
    steps.now_us += LONG_US
    assert steps.left_us == 0
    steps.launch()
    assert steps.left_us == 0, "two are in flight"


def test_short_steps_are_launched_at_once() -> None:
    steps = Steps()
    steps.run(*[MARGIN_US] * 5)
    assert steps.left_us == 0


def test_a_step_behind_an_idle_device_counts_from_its_launch() -> None:
    steps = Steps()
    steps.launch()
    steps.end(LONG_US)
    steps.now_us += 1e6
    steps.launch()
    assert steps.left_us == pytest.approx(LONG_US - MARGIN)
    steps.end(LONG_US)
    steps.launch()
    assert steps.left_us == pytest.approx(LONG_US - MARGIN)


def test_expectations_fall_at_once_and_rise_slowly() -> None:
    """A host that is busy sees a step end late."""
    steps = Steps()
    steps.run(LONG_US, 30 * LONG_US)
    assert steps.left_us == pytest.approx(
        GROWTH * LONG_US * (1 - MARGIN_SHARE) - MARGIN_US, rel=1e-6
    )
    steps.run(LONG_US / 2)
    assert steps.left_us == pytest.approx(LONG_US / 2 * (1 - MARGIN_SHARE) - MARGIN_US)


def test_steps_on_the_host_leave_a_launch_more_time() -> None:
    """A launch there shares the step's cores, and so would a loop that spins until it is due."""
    steps = Steps(shares_cores=True)
    steps.run(LONG_US)
    assert steps.left_us == pytest.approx(LONG_US - MARGIN - HOST_MARGIN_US + MARGIN_US)


@pytest.mark.parametrize("shares_cores", [False, True], ids=["device", "host"])
def test_who_waits_for_the_last_moments_spins_only_beside_a_device(monkeypatch, shares_cores: bool):
    steps = Steps(shares_cores=shares_cores)
    steps.run(LONG_US)
    naps_us: list[float] = []

    async def nap(seconds: float) -> None:
        naps_us.append(1e6 * seconds)
        steps.now_us += max(1e6 * seconds, 100.0)

    monkeypatch.setattr(asyncio, "sleep", nap)
    left_us = steps.left_us
    asyncio.run(steps.late.until_due())
    if not shares_cores:
        assert naps_us[0] == pytest.approx(left_us - 1e6 * TICK_S)
        assert len(naps_us) > 5
        assert not any(naps_us[1:])
    else:
        assert naps_us == pytest.approx([left_us])


def test_a_step_with_prompts_tells_nothing_of_one_without() -> None:
    """Both have four decode rows. Break it: the key of a graph, which an eager step has not."""
    steps = Steps(captures_graphs=False)
    steps.launch(tokens=40, is_captured=False)
    steps.launch(is_captured=False)
    steps.end(10 * LONG_US)
    assert steps.left_us == 0, "a new shape"


def test_a_failed_step_tells_nothing() -> None:
    steps = Steps()
    steps.run(LONG_US)
    steps.launch()
    steps.end(100.0, RuntimeError("planted"))
    assert steps.left_us == pytest.approx(LONG_US - MARGIN)


@pytest.mark.parametrize("left_over", ["waiting", "prefilling", "full"])
def test_with_work_left_over_nobody_could_join(left_over: str) -> None:
    steps = Steps()
    steps.run(LONG_US)
    if left_over == "waiting":
        steps.context.waiting.append("request")
    elif left_over == "prefilling":
        steps.context.scheduler.prefilling.append(1)
    else:
        steps.context.slots.num_free = 0
    assert steps.left_us > 0, "what arrives now is no backlog"
    steps.run(LONG_US)
    assert steps.left_us == 0


@pytest.mark.parametrize("captures_graphs", [True, False])
def test_launches_kernel_by_kernel_take_long(captures_graphs: bool) -> None:
    steps = Steps(captures_graphs)
    for _ in range(3):
        steps.launch(is_captured=False)
    steps.end(LONG_US)
    steps.end(LONG_US)
    assert (steps.left_us > 0) == (not captures_graphs)


def test_late_launches_are_counted_and_the_margin_grows() -> None:
    steps = Steps()
    steps.run(LONG_US)
    for expected in (BACK_OFF_US, 2 * BACK_OFF_US, 4 * BACK_OFF_US):
        steps.in_flight[-1].ready.query = lambda: True
        steps.run(LONG_US)
        assert steps.left_us == pytest.approx(LONG_US - MARGIN - expected)
    assert steps.statistics.late_launches == 3
    steps.run(*[LONG_US] * 500)
    assert steps.left_us == pytest.approx(LONG_US - MARGIN, rel=0.01)
    assert steps.statistics.late_launches == 3


def test_an_event_that_cannot_be_asked_is_left_to_its_resolve() -> None:
    def query() -> bool:
        raise RuntimeError("planted")

    steps = Steps()
    steps.run(LONG_US)
    steps.in_flight[-1].ready.query = query
    steps.launch()
    assert steps.statistics.late_launches == 0


def serve(late: bool) -> Simulated:
    prompts, outputs = LengthDistribution(256, 1024, 0.6), LengthDistribution(128, 512, 0.6)
    trace = poisson_trace(40, 250, prompts, outputs, SHAPE.vocab_size, 0)
    config = InferenceConfig(
        num_kv_blocks=8000, block_size_tokens=64, max_sequence_length=1536, late_launch=late
    )
    return simulate(trace, SHAPE, config, MACHINES["h200:llama-3.1-8b"])


def test_first_tokens_come_earlier_and_the_device_is_as_busy() -> None:
    usual, late = (serve(is_late).figures() for is_late in (False, True))
    assert late["ttft_ms"]["p50"] < usual["ttft_ms"]["p50"] - 2
    assert late["ttft_ms"]["p99"] < usual["ttft_ms"]["p99"]
    assert late["tpot_ms"]["p50"] < 1.01 * usual["tpot_ms"]["p50"]
    assert late["idle_share"] < usual["idle_share"] + 0.005
    assert late["overlap_ratio"] > 0.99


def test_tokens_are_the_same() -> None:
    """In `run_engine`, with requests that arrive while it waits for a launch to be due."""
    model, prompts = make_model(TINY), random_prompts(7, (4, 19, 33, 7, 12, 25))
    params = [greedy(12 + 5 * number) for number in range(len(prompts))]
    serial = make_engine(model, lookahead=0)
    futures = [serial.add_request(i, p, s) for i, (p, s) in enumerate(zip(prompts, params))]
    drain(serial)
    expected = [future.result().generated_tokens for future in futures]
    engine = make_engine(model, lookahead=1)
    assert engine.context.device.shares_cores
    ticking = TickingLaunches(engine.launching)
    asyncio.run(_serve(engine, prompts, params, expected))
    assert ticking.waits > 5


async def _serve(engine: DynamicInferenceEngine, prompts: Any, params: Any, expected: Any) -> None:
    runner = asyncio.create_task(engine.run_engine())
    futures = []
    for number, (prompt, mine) in enumerate(zip(prompts, params)):
        futures.append(engine.add_request(number, prompt, mine))
        await asyncio.sleep(0.01)
    found = [(await asyncio.wait_for(future, PATIENCE_S)).generated_tokens for future in futures]
    assert found == expected
    engine.close()
    await runner


def test_which_launches_wait(lookahead: int) -> None:
    def context(asked: bool | None) -> Any:
        return SimpleNamespace(config=SimpleNamespace(late_launch=asked, lookahead=lookahead))

    assert launches_late(context(None)) == (lookahead == 1)
    assert launches_late(context(True))
    assert not launches_late(context(False))


@pytest.mark.parametrize("lookahead", [0, 2])
def test_other_lookaheads_are_refused(lookahead: int) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"late_launch=True is for lookahead 1, not {lookahead}"
    ):
        InferenceConfig(late_launch=True, lookahead=lookahead)
