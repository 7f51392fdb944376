"""The one way in which kernels are timed: replays of a graph on the engines' compute stream."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from kernel_cases.case import Chain
from megatron_async.devices import make_device

WINDOWS = 5


@torch.inference_mode()
def microseconds(chain: Chain, replays: int) -> float:
    """Median device time of one link, microseconds.

    A window is `replays` replays between two events on the compute stream, as steps follow each
    other there: dependent launch works on one stream only. The first window is left out.
    """
    device = make_device("cuda")
    device.fence()
    device.compute.launch(chain.run)  # compiles
    again = device.capture(chain.run).replay if chain.captured else chain.run
    times = []
    for _ in range(WINDOWS + 1):
        start, end = device.event(timing=True), device.event(timing=True)
        device.compute.record(start)
        for _ in range(replays):
            device.compute.launch(again)
        device.compute.record(end)
        end.wait()
        times.append(end.us_since(start) / replays)
    return statistics.median(times[1:]) / chain.links


def repeated(run: Callable[[], object], times: int) -> Chain:
    """A chain of so many calls of a function, whose results are dropped."""

    def calls() -> None:
        for _ in range(times):
            run()

    return Chain(calls, times)
