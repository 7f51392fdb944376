"""What captured work takes, replayed back to back: an engine's decode step without bookkeeping, its
limit, or one call of many."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megatron_async.contexts.request_slots import SlotState
from megatron_async.device_state.recurrent_state import RecurrentState
from megatron_async.devices import Device
from megatron_async.ops.sampling.sampling import SamplingMode

if TYPE_CHECKING:
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine


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
