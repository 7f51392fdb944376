"""Whole-step graphs: one for each padded number of decode rows, from unpacking to feeding back.

A graph replays fixed kernels on fixed addresses. That fits, because everything that changes from
step to step lies in the bookkeeping buffer or in per-slot arrays, and shapes depend on the padded
size only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tqdm import tqdm

from megatron_async.contexts.batch_dimensions import BatchDimensions
from megatron_async.devices import Device, Graph
from megatron_async.ops.sampling import SamplingMode

CAPTURED_MODES = (SamplingMode.GREEDY, SamplingMode.FILTERED)
"""Two graphs a size: greedy steps do without the sampler's searches. FILTERED serves SOFTMAX
too."""


@dataclass(frozen=True)
class CaptureReport:
    """What capturing cost."""

    graphs: int
    seconds: float
    bytes: int
    """Device memory that the graphs' shared pool took."""


class StepGraphs:
    """Captured decode steps, by number of rows and sampling mode.

    Args:
        device: the device that captures.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[tuple[int, SamplingMode], Graph] = {}

    def capture(
        self,
        shapes: Sequence[BatchDimensions],
        prepare: Callable[[BatchDimensions], None],
        step: Callable[[BatchDimensions, SamplingMode], None],
        progress: bool,
    ) -> CaptureReport:
        """Capture every shape in every mode, largest first, so that smaller ones reuse its memory.

        Args:
            shapes: padded decode-only shapes.
            prepare: fills the bookkeeping buffer with dummy rows of a shape.
            step: the step's device work.
            progress: show a bar.
        """
        start, free = time.perf_counter(), self._device.free_memory()
        largest_first = sorted(shapes, key=lambda dims: -dims.decode_rows)
        jobs = [(dims, mode) for dims in largest_first for mode in CAPTURED_MODES]
        for dims, mode in tqdm(jobs, desc="capture graphs", unit="graph", disable=not progress):
            prepare(dims)
            # Once eagerly: kernels are compiled and libraries make their workspaces.
            work = partial(step, dims, mode)
            self._device.compute.launch(work)
            self._graphs[dims.decode_rows, mode] = self._device.capture(work)
        used = max(free - self._device.free_memory(), 0)
        return CaptureReport(len(jobs), time.perf_counter() - start, used)

    def find(self, dims: BatchDimensions, mode: SamplingMode) -> Graph | None:
        """The graph for a step of this shape and mode; None where none was captured."""
        if mode != SamplingMode.GREEDY:
            mode = SamplingMode.FILTERED
        return self._graphs.get((dims.decode_rows, mode)) if dims.is_captured else None
