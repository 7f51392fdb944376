"""Which steps are captured, and which graph serves a step."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.devices import CpuDevice, cpu
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.planning.graph_shapes import FINE_TOKENS, GraphShapes, mixed_graph_sizes
from megatron_async.step import step_graphs
from megatron_async.step.step_graphs import CAPTURED_MODES, MOST_GENERAL, EagerStep, StepGraphs


class NamedGraph:
    """What was captured."""

    def __init__(self, work: Any) -> None:
        self.dims, self.mode = work.args
        self.replay = work


class SlowToLaunch(CpuDevice):
    """Launching a step takes `launch_ms` of the host's time, if it is slow at all."""

    captures_graphs = True
    launch_ms = 8.0

    def capture(self, work: Callable[[], None]) -> Any:
        return NamedGraph(work)


class Clocks:
    """Nanoseconds of the host and of the device, which move with their work alone."""

    host = device = 0


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    Clocks.host = Clocks.device = 0
    host = SimpleNamespace(perf_counter=lambda: Clocks.host / 1e9)
    device = SimpleNamespace(**vars(time) | {"perf_counter_ns": lambda: Clocks.device})
    monkeypatch.setattr(step_graphs, "time", host)
    monkeypatch.setattr(cpu, "time", device)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SlowToLaunch:
    device = SlowToLaunch()
    launch = device.compute.launch

    def slow(work: Any) -> None:
        Clocks.host += int(device.launch_ms * 1e6)
        launch(work)

    monkeypatch.setattr(device.compute, "launch", slow)
    return device


def nothing(*_: Any) -> None:
    """A step of dummy rows is the next."""


def run(dims: BatchDimensions, _mode: SamplingMode) -> None:
    """A millisecond, and one more for each 16 tokens."""
    Clocks.device += 1_000_000 + dims.tokens * 62_500


def shapes_of(*sizes: int) -> GraphShapes:
    return GraphShapes((4,), {size: (0, 4) for size in sizes}, prefill_rows=2)


def test_shapes_are_captured_until_launching_is_cheap(device: SlowToLaunch) -> None:
    """8 ms are a fifth of 40 ms, which 624 tokens take."""
    shapes = shapes_of(64, 128, 256, 1024, 2048)
    measured = StepGraphs(device).measure_mixed_shapes(shapes, nothing, run)
    assert [step.prefill_tokens for step in measured] == [64, 128, 256, 1024]
    assert [step.is_cheap for step in measured] == [False, False, False, True]
    assert list(shapes.mixed_sizes) == [64, 128, 256]


def test_a_fast_host_captures_none() -> None:
    shapes = shapes_of(64, 256)
    measured = StepGraphs(SlowToLaunch()).measure_mixed_shapes(shapes, nothing, run)
    assert measured[0].host_ms < 1
    assert not shapes.mixed_sizes


def test_short_mixed_steps_are_found_by_replays() -> None:
    """64 tokens take 5 ms, 80 take 6, 256 take 17: more than 1.8 times as long."""
    graphs, shapes, prepared = StepGraphs(SlowToLaunch()), shapes_of(64, 80, 256), []
    graphs.capture(shapes.all_shapes(), nothing, run, progress=False)
    graphs.time_mixed_shapes(shapes, prepared.append)
    assert shapes.mixed_step_tokens == 80
    assert {dims.tokens for dims in prepared} == {64, 80, 256}


def test_slow_shapes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 tokens take 12 ms where 192 take 10: steps of 100 tokens are padded to 192."""
    graphs, shapes = StepGraphs(SlowToLaunch()), shapes_of(64, 128, 192, 256)
    graphs.capture(shapes.all_shapes(), nothing, run, progress=False)
    captured = graphs.count
    took = iter([4.0] * 3 + [12.0] * 3 + [10.0] * 3 + [11.0] * 3)
    monkeypatch.setattr(graphs, "_replay_ms", lambda *_: next(took))
    graphs.time_mixed_shapes(shapes, nothing)
    assert list(shapes.mixed_sizes) == [64, 192, 256]
    assert graphs.count == captured - len(CAPTURED_MODES) * 2
    found = shapes.find(4, 1, 100)
    assert found is not None
    assert found.prefill_tokens == 192
    assert graphs.find(found, SamplingMode.GREEDY) is not None
    assert not graphs.find(shapes.shape(4, 128), SamplingMode.GREEDY)


def test_a_shape_that_is_slow_on_one_rank_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, shapes = StepGraphs(SlowToLaunch()), shapes_of(64, 128)
    graphs.capture(shapes.all_shapes(), nothing, run, progress=False)
    took = iter([12.0] * 3 + [10.0] * 3)
    monkeypatch.setattr(graphs, "_replay_ms", lambda *_: next(took))
    asked: list[int] = []

    def least(value: int) -> int:
        asked.append(value)
        return 0

    monkeypatch.setattr(step_graphs, "agree_on_least", least)
    graphs.time_mixed_shapes(shapes, nothing)
    assert asked == [1, 0], "every rank says as many numbers"
    assert list(shapes.mixed_sizes) == [64, 128]


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ([1.0, 2.0, 3.0], []),
        ([1.0, 3.2, 3.0], []),
        ([1.0, 3.4, 3.0], [128]),
        ([3.4, 3.5, 3.0], [64, 128]),
        ([1.0], []),
        ([], []),
    ],
)
def test_what_is_slow(times: list[float], slow: list[int]) -> None:
    assert shapes_of(64, 128, 256, 2048).slow_sizes(times) == slow


@pytest.mark.parametrize(
    ("host_ms", "device_ms", "is_cheap"),
    [(0.9, 1.0, True), (1.1, 5.0, False), (4.0, 21.0, True), (4.0, 19.0, False)],
)
def test_what_is_cheap(host_ms: float, device_ms: float, is_cheap: bool) -> None:
    assert EagerStep(64, 0, host_ms, device_ms).is_cheap == is_cheap


@pytest.mark.parametrize("mode", SamplingMode)
def test_every_step_of_a_captured_shape_has_its_graph(mode: SamplingMode) -> None:
    graphs = StepGraphs(SlowToLaunch())
    shapes = shapes_of(64, FINE_TOKENS, FINE_TOKENS + 32)
    graphs.capture(shapes.all_shapes(), nothing, run, progress=False)
    for tokens in (0, 64, FINE_TOKENS, FINE_TOKENS + 32):
        dims = shapes.shape(4, tokens)
        found: Any = graphs.find(dims, mode)
        assert found.dims == dims
        assert found.mode >= mode, "it does all that the step needs"
        assert (found.mode == MOST_GENERAL) == (
            tokens > FINE_TOKENS or mode == SamplingMode.PROCESSED
        )
    assert graphs.find(BatchDimensions(4), mode) is None


@pytest.mark.parametrize("requests", [1, 7, 64, 256])
@pytest.mark.parametrize("tokens", [256, 2048, 8192])
def test_padding_is_small_where_tokens_cost(requests: int, tokens: int) -> None:
    """An eighth of the prompts' tokens, a quarter below 512; and 64 decode rows, or an eighth."""
    shapes = GraphShapes((requests,), mixed_graph_sizes(requests, tokens), prefill_rows=1)
    for prefill in range(FINE_TOKENS, tokens + 1, 37):
        for decode in range(0, min(requests, tokens - prefill) + 1, 5):
            dims = shapes.find(decode, 1, prefill)
            assert dims is not None
            assert dims.prefill_tokens - prefill < max(prefill / 8, 64)
            assert dims.decode_rows - decode < max(prefill / 7, 64)
