"""Time an engine's steps: wall time over windows and step by step, and the engine's own counters.

When the CPU runs ahead of a GPU, the wall time of one call of `step_modern` is the time until the
next step may be launched, not the length of a step on the device; over a window of steps the two
agree, so windows are what step times are quoted from, and single steps what jitter is seen in.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_async.device_state.recurrent_state import RecurrentState
from megatron_async.devices import Device
from megatron_async.lab.benchmark_record import distribution
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.planning.request_slots import SlotState

if TYPE_CHECKING:
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
    from megatron_async.observe.statistics import EngineStatistics

NSYS_SESSION = "NSYS_PROFILING_SESSION_ID"
"""Environment variable that nsys sets for the program it profiles."""

Report = dict[str, Any]
"""What `step_modern` returns."""


@dataclass(frozen=True)
class StepTimes:
    """Figures of a run of steps; counters are of that run alone."""

    step_ms: float
    """Median over windows of the mean step, work between steps included."""
    step_p50_ms: float
    """Percentiles of single steps, from the end of one call to the end of the next."""
    step_p90_ms: float
    step_p99_ms: float
    tokens_per_second: float
    """Generated tokens a step over `step_ms`."""
    rows: float
    """Mean rows of a step."""
    overlap_ratio: float
    """Share of steps launched before the step before them was resolved."""
    zombie_rows: int
    prepare_us: float
    """CPU time of the engine's thread a step, waits not counted; so are the next two."""
    launch_us: float
    resolve_us: float


@contextmanager
def captured_by_nsys() -> Iterator[None]:
    """Mark a range to capture for Nsight Systems, where it profiles this process."""
    under_nsys = NSYS_SESSION in os.environ and torch.cuda.is_available()
    if under_nsys:
        torch.cuda.profiler.start()
    yield
    if under_nsys:
        torch.cuda.profiler.stop()


def time_steps(
    engine: DynamicInferenceEngine,
    windows: int,
    steps: int,
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[Report], None] | None = None,
) -> StepTimes:
    """Run and time `windows * steps` steps.

    Under Nsight Systems they are marked as the range to capture (`cudaProfilerStart`).

    Args:
        engine: with requests enough; warmed up.
        windows: the median is taken over them.
        steps: in each window.
        before_step: called before each step (arrivals); its time counts.
        after_step: called with each step's report; its time counts.
    """
    with captured_by_nsys():
        before = deepcopy(engine.statistics)
        ends = [time.perf_counter()]
        for _ in range(windows * steps):
            if before_step is not None:
                before_step()
            report = engine.step_modern()
            if after_step is not None:
                after_step(report)
            ends.append(time.perf_counter())
        after = deepcopy(engine.statistics)
    singles = distribution(1e3 * (end - start) for start, end in pairwise(ends))
    means = [
        (ends[first + steps] - ends[first]) / steps for first in range(0, windows * steps, steps)
    ]
    step = statistics.median(means)
    tokens = (after.generated_tokens - before.generated_tokens) / (windows * steps)
    return StepTimes(
        step_ms=step * 1e3,
        step_p50_ms=singles["p50"] or 0.0,
        step_p90_ms=singles["p90"] or 0.0,
        step_p99_ms=singles["p99"] or 0.0,
        tokens_per_second=tokens / step,
        **counted(before, after),
    )


def counted(before: EngineStatistics, after: EngineStatistics) -> dict[str, Any]:
    """What an engine's counters say of the steps launched between two copies of them: "rows",
    "overlap_ratio", "zombie_rows", "prepare_us", "launch_us", "resolve_us"; see `StepTimes`."""
    launched = max(after.steps - before.steps, 1)
    return {
        "rows": (after.rows - before.rows) / launched,
        "overlap_ratio": after.overlap_ratio_since(before),
        "zombie_rows": after.zombie_rows - before.zombie_rows,
        "prepare_us": (after.prepare_ns - before.prepare_ns) / 1e3 / launched,
        "launch_us": (after.launch_ns - before.launch_ns) / 1e3 / launched,
        "resolve_us": (after.resolve_ns - before.resolve_ns) / 1e3 / launched,
    }


if TYPE_CHECKING:
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine


def replay_ms(
    engine: DynamicInferenceEngine,
    batch: int,
    mode: SamplingMode = SamplingMode.GREEDY,
    windows: int = 5,
    replays: int = 100,
    width: int = 1,
) -> float | None:
    """Milliseconds a step, the median of windows; None where nothing is captured.

    Requests in flight lose their meaning: use the engine for nothing else after it. With several
    ranks each of them calls it, because a step's collectives are replayed too. A replay makes
    sequences longer, as a step does: each window begins again at the present lengths, and has no
    more replays than the requests have tokens left, after which rows would do nothing.

    Args:
        engine: with steps in flight, or none.
        batch: decode rows.
        mode: of the graph.
        windows: the median is taken over them.
        replays: at most, in each window.
        width: of the rows.
    """
    for step in engine.in_flight:
        step.ready.wait()
    dims = engine.context.graph_shapes.find(batch, 0, 0, width)
    graph = None if dims is None else engine.controller.graphs.find(dims, mode)
    if graph is None:
        return None
    times = []
    device, view, slots = engine.context.device, engine.context.gpu_view, engine.context.slots
    running = np.flatnonzero(slots.state == SlotState.DECODING)
    left = slots.max_length[running] - slots.at_least(running) - len(engine.in_flight)
    replays = max(1, min(replays, int(left.min(initial=replays * width)) // width))
    recurrent = view.states.find(RecurrentState)
    moved = [view.slots.length, *([] if recurrent is None else [recurrent.base])]
    kept = [tensor.clone() for tensor in moved]
    for _ in range(windows):
        device.compute.launch(partial(_put_back, moved, kept))
        start, end = device.event(timing=True), device.event(timing=True)
        device.compute.record(start)
        for _ in range(replays):
            device.compute.launch(graph.replay)
        device.compute.record(end)
        end.wait()
        times.append(end.us_since(start) / 1e3 / replays)
    return statistics.median(times)


def _put_back(tensors: list[torch.Tensor], kept: list[torch.Tensor]) -> None:
    for tensor, before in zip(tensors, kept, strict=True):
        tensor.copy_(before)


def call_us(device: Device, call: Callable[[], object], calls: int = 64, repeats: int = 7) -> float:
    """Median microseconds of a call that a graph makes many times in a row; with several ranks,
    which all measure the same, those of the slowest.

    Args:
        device: a GPU.
        call: enqueues work on its compute stream.
        calls: in the graph.
        repeats: replays that are measured, each after another, so that ranks begin it together.
    """

    def all_calls() -> None:
        for _ in range(calls):
            call()

    device.fence()
    device.compute.launch(all_calls)
    graph = device.capture(all_calls)
    times = []
    for _ in range(repeats):
        start, end = device.event(timing=True), device.event(timing=True)
        device.compute.launch(graph.replay)
        device.compute.record(start)
        device.compute.launch(graph.replay)
        device.compute.record(end)
        end.wait()
        times.append(end.us_since(start) / calls)
    slowest = torch.tensor([statistics.median(times)])
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()
