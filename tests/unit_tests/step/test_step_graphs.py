"""Which steps are captured, and which graph serves a step."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async import (
    DynamicInferenceContext,
    GPTInferenceWrapper,
    InferenceConfig,
    TextGenerationController,
    choices,
)
from megatron_async.cache_folders import SERVICE_VARIABLE, VARIABLE, cache_folder
from megatron_async.choices import Choices
from megatron_async.devices import CpuDevice, cpu
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.planning.graph_shapes import (
    FINE_TOKENS,
    GraphShapes,
    MixedRow,
    mixed_graph_sizes,
    packed_graph_sizes,
)
from megatron_async.step import step_graphs
from megatron_async.step.step_graphs import (
    CAPTURED_MODES,
    MOST_GENERAL,
    CaptureReport,
    EagerStep,
    StepGraphs,
)
from tests.support.harness import make_model
from tests.support.ranks import run_ranks


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
    """8 ms are a fifth of 40 ms, which 624 tokens take: found by halves, with any sizes.

    Break it: halve on the wrong side.
    """
    sizes = 64, 128, 256, 512, 1024, 2048
    for end in range(len(sizes) + 1):
        shapes = shapes_of(*sizes[:end])
        measured = StepGraphs(device).measure_mixed_shapes(shapes, nothing, run)
        assert list(shapes.mixed_sizes) == [*sizes[: min(end, 4)]]
        assert [step.is_cheap for step in measured if step.prefill_tokens < 1024].count(True) == 0
        if end > 4:
            assert (measured[-1].prefill_tokens, measured[-1].is_cheap) == (1024, True)
        elif end:
            assert [step.prefill_tokens for step in measured] == [sizes[end - 1]]


def test_a_fast_host_captures_none() -> None:
    shapes = shapes_of(64, 256)
    measured = StepGraphs(SlowToLaunch()).measure_mixed_shapes(shapes, nothing, run)
    assert measured[0].host_ms < 1
    assert not shapes.mixed_sizes


def test_one_step_of_a_kind_runs_before_its_graphs_are_captured(device: SlowToLaunch) -> None:
    """Decode steps, prompts alone, and both; each in three modes, of the most tokens. A second
    capture, behind a suspension, runs none.

    Break it: forget a kind.
    """
    graphs, shapes, ran, prepared = StepGraphs(device), shapes_of(64, 128), [], []

    def step(dims: BatchDimensions, mode: SamplingMode) -> None:
        ran.append((dims.decode_rows, dims.prefill_tokens, mode))

    for _ in range(2):
        graphs.capture(shapes.all_shapes(), prepared.append, step, progress=False)
        graphs.clear()
    done = device.event()
    device.compute.record(done)
    done.wait()
    kinds = [(rows, tokens) for rows, tokens in ((4, 128), (0, 128), (4, 0))]
    assert sorted(ran) == sorted((*kind, mode) for kind in kinds for mode in CAPTURED_MODES)
    assert [(d.decode_rows, d.prefill_tokens) for d in prepared] == [each[:2] for each in ran]


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
    assert graphs.missing(shapes.all_shapes()) == []
    assert graphs.count == captured - len(CAPTURED_MODES) * 2
    found = shapes.find(4, 1, 100)
    assert found is not None
    assert found.prefill_tokens == 192
    assert graphs.find(found, SamplingMode.GREEDY) is not None
    assert not graphs.find(shapes.shape(4, 128), SamplingMode.GREEDY)


def test_the_leaders_times_count(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, shapes = StepGraphs(SlowToLaunch()), shapes_of(64, 128)
    graphs.capture(shapes.all_shapes(), nothing, run, progress=False)
    took = iter([12.0] * 3 + [10.0] * 3)
    monkeypatch.setattr(graphs, "_replay_ms", lambda *_: next(took))
    monkeypatch.setattr(step_graphs, "leaders", lambda name, times: [10.0, 12.0])
    graphs.time_mixed_shapes(shapes, nothing)
    assert list(shapes.mixed_sizes) == [64, 128]


def _measured_on_rank() -> tuple[list[int], list[int], int | None]:
    """The second rank's host is slow for longer, and another size is slow on its device."""
    rank = int(os.environ["RANK"])
    graphs, shapes = StepGraphs(SlowToLaunch()), shapes_of(64, 96, 128, 192, 256)
    cheap_from = (256, 192)[rank]

    def launch(dims: BatchDimensions, *_: Any) -> EagerStep:
        return EagerStep(dims.tokens, 0, 0.5 if dims.tokens >= cheap_from else 8.0, 9.0)

    graphs._measure = launch  # type: ignore[method-assign]
    graphs.measure_mixed_shapes(shapes, nothing, run)
    captured = list(shapes.mixed_sizes)
    graphs.capture(shapes.all_shapes(), nothing, run, progress=False)
    slow = (96, 128)[rank]
    graphs._replay_ms = lambda graph, dims, prepare: (  # type: ignore[method-assign]
        dims.tokens + 90.0 * (dims.tokens == slow)
    )
    graphs.time_mixed_shapes(shapes, nothing)
    return captured, shapes.row.sizes, shapes.row.step_tokens


def test_ranks_capture_what_the_leader_has_measured() -> None:
    of_leader = [64, 96, 128, 192], [64, 128, 192], 64
    assert run_ranks(2, _measured_on_rank) == [of_leader, of_leader]


def test_a_size_that_another_process_kept_is_captured_too() -> None:
    graphs, shapes = StepGraphs(SlowToLaunch()), shapes_of(64, 128)
    asked = dict(shapes.mixed_sizes)
    del shapes.mixed_sizes[64]
    graphs.capture(shapes.all_shapes(), nothing, run, progress=False)
    shapes.apply(MixedRow([64], 64), asked)
    missing = graphs.missing(shapes.all_shapes())
    assert [dims.prefill_tokens for dims in missing] == [64, 64]
    graphs.capture(missing, nothing, run, progress=False)
    assert graphs.missing(shapes.all_shapes()) == []
    assert not graphs.find(shapes.shape(4, 128), SamplingMode.GREEDY)


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


MANY = {"max_requests": 4, "max_tokens": 512, "num_cuda_graphs": 1, "num_kv_blocks": 16}


def start(
    model: torch.nn.Module, device: CpuDevice, ms: dict[int, float], mode: str = "cached"
) -> tuple[GraphShapes, CaptureReport]:
    """An engine's captures on a device whose steps take `ms` by their tokens, or 1/16 ms a
    token: the shapes, and the report."""
    config = InferenceConfig(choices=mode, **MANY)
    context = DynamicInferenceContext(model.config, config, device)
    context.graph_shapes.capture_mixed(config)  # as on a GPU, whose attention is captured

    def spend(dims: BatchDimensions, _mode: SamplingMode) -> None:
        Clocks.device += int(ms.get(dims.tokens, 1 + dims.tokens / 16) * 1e6)

    controller = TextGenerationController(GPTInferenceWrapper(model, context))
    controller._compute_step = spend  # type: ignore[method-assign]
    report = controller.create_cuda_graphs()
    assert report is not None
    shapes = context.graph_shapes
    assert controller.graphs.missing(shapes.all_shapes()) == []
    assert report.mixed_sizes == tuple(shapes.mixed_sizes)
    return shapes, report


def plans(shapes: GraphShapes) -> list[Any]:
    """The padded shapes of steps, and how many prompt tokens a step may have."""
    sizes = range(1, 513, 7)
    padded = [shapes.find(decode, 1, tokens) for tokens in sizes for decode in (0, 3)]
    return [shapes.mixed_step_tokens, *padded]


@pytest.fixture(scope="module")
def tiny_model() -> torch.nn.Module:
    return make_model()


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.delenv(SERVICE_VARIABLE, raising=False)
    monkeypatch.setattr(choices, "SHIPPED", tmp_path / "shipped.json")


def test_two_starts_capture_the_same(own_cache, tiny_model, device):
    """Though the times differ: the second alone has no slow size, and a host that launches
    faster. A plan does not know where the row is from."""
    first, report = start(tiny_model, device, {96: 30.0})
    assert 96 not in first.mixed_sizes
    assert "(measured)" in str(report)
    assert report.eager_steps
    device.launch_ms = 0.5
    second, report = start(tiny_model, device, {128: 90.0})
    assert "(cached)" in str(report)
    assert not report.eager_steps
    assert plans(second) == plans(first)
    third, report = start(tiny_model, device, {128: 90.0}, "measure")
    assert plans(third) != plans(first)
    (kept,) = cache_folder("choices").iterdir()
    kept.rename(choices.SHIPPED)
    fourth, report = start(tiny_model, device, {}, "shipped")
    assert "(shipped)" in str(report)
    assert plans(fourth) == plans(third)


def test_sizes_of_a_process_that_was_first_have_graphs(
    own_cache: None,
    tiny_model: torch.nn.Module,
    device: SlowToLaunch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep, first = Choices.keep, MixedRow([64, 96], 96)
    monkeypatch.setattr(Choices, "keep", lambda mine, question, row: keep(mine, question, first))
    device.launch_ms = 0.5  # by its own times it would capture none
    shapes, _ = start(tiny_model, device, {})
    assert shapes.row == first


def test_replicas_which_measure_at_once_capture_the_same(
    own_cache: None,
    tiny_model: torch.nn.Module,
    device: SlowToLaunch,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Each has its own times; also where all are to measure anew, and after a new start."""
    monkeypatch.setenv(SERVICE_VARIABLE, str(tmp_path / "service"))
    second_plans: list[Any] = []
    keep = Choices.keep

    def keep_behind_the_other(mine: Choices, *measured: Any) -> Any:
        monkeypatch.setattr(Choices, "keep", keep)
        second_plans.extend(plans(start(tiny_model, device, {128: 90.0}, "measure")[0]))
        return keep(mine, *measured)

    monkeypatch.setattr(Choices, "keep", keep_behind_the_other)
    first, report = start(tiny_model, device, {96: 30.0}, "measure")
    assert "(measured)" in str(report)
    assert 96 in first.mixed_sizes
    assert 128 not in first.mixed_sizes
    third, _ = start(tiny_model, device, {}, "measure")
    assert plans(first) == second_plans == plans(third)


def test_by_rule_all_sizes_are_captured(own_cache, tiny_model, device):
    shapes, report = start(tiny_model, device, {96: 30.0}, "shipped")
    assert "(by rule)" in str(report)
    assert shapes.mixed_sizes == packed_graph_sizes(4, 512)
    assert shapes.mixed_step_tokens == FINE_TOKENS


@pytest.mark.parametrize(
    "value",
    [
        {"sizes": [65], "step_tokens": 64},
        {"sizes": [96, 64], "step_tokens": 64},
        {"sizes": [64, 64], "step_tokens": 64},
        {"sizes": [64], "step_tokens": 0},
        {"sizes": [64], "step_tokens": "all"},
        {"sizes": [64], "step_tokens": 96},
        {"sizes": [], "step_tokens": 64},
        {"sizes": [64], "step_tokens": 1 << 60},
        {"sizes": [64], "step_tokens": -64},
    ],
)
def test_a_row_of_no_sizes_is_passed_over(
    own_cache: None,
    tiny_model: torch.nn.Module,
    device: SlowToLaunch,
    value: dict[str, Any],
    caplog: Any,
) -> None:
    start(tiny_model, device, {})
    (kept,) = cache_folder("choices").iterdir()
    table = json.loads(kept.read_text())
    table["rows"][0]["value"] = value
    kept.write_text(json.dumps(table))
    assert "(measured)" in str(start(tiny_model, device, {})[1])
    assert str(kept) in caplog.text
