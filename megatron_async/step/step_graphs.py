"""Whole-step graphs: one for each padded shape, from unpacking to feeding back.

A graph replays fixed kernels on fixed addresses. This is possible because all data that changes
from step to step is in rings and per-slot arrays, which the kernels index by numbers on the device,
and because shapes depend only on the padded size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from torch import Tensor, nn
from tqdm import tqdm

from megatron_async.choices import Fact, Question, leaders
from megatron_async.devices import Device, Graph
from megatron_async.models.model_config import DECIDING_TIMES
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.graph_shapes import FINE_TOKENS, GraphShapes, MixedRow

CAPTURED_MODES = (SamplingMode.GREEDY, SamplingMode.FILTERED, SamplingMode.PROCESSED)
"""Three graphs a shape: greedy steps skip the sampler's searches, and only steps with a row that
needs it process logits and give log probs. FILTERED serves SOFTMAX too, except on
tensor-parallel ranks, which gather no logits for SOFTMAX."""

MOST_GENERAL = max(CAPTURED_MODES)
"""The mode whose graphs serve all modes. Mixed shapes of more than `FINE_TOKENS` are captured only
for this mode: they are many, and their sampling is cheap compared with their products."""

LAUNCH_MS = 1.0
LAUNCH_SHARE = 0.2
"""A step may be launched kernel by kernel if this takes the CPU at most so many milliseconds, or
this share of the device's time. With a larger share, the device would wait for a host that becomes
a few times slower under load."""

TIMED_REPLAYS = 3
"""The first replay of a graph brings it to the device."""

OF_CONFIG = (
    "block_size_tokens", "max_requests", "max_tokens", "cuda_graph_mixed_prefill_count",
    "speculative_method", "num_speculative_tokens", "draft_vocab_size", "mamba_ssm_states_dtype",
    "batch_invariant_mode", "has_fp8_cache",
)  # fmt: skip
"""Settings which decide how long a mixed step takes, or which there are."""

Prepare = Callable[[BatchDimensions], None]
"""Makes a step of dummy rows the next on the device."""
Step = Callable[[BatchDimensions, SamplingMode], None]
"""The device work of a step."""
Hidden = Callable[[], Tensor | None]
"""The hidden states of the step that ran last, `[tokens, hidden]`, after the last norm."""


@dataclass(frozen=True)
class EagerStep:
    """A mixed step run eagerly; milliseconds."""

    prefill_tokens: int
    decode_rows: int
    host_ms: float
    """Time in which the CPU launches the kernels one by one."""
    device_ms: float
    """Time from the first kernel to the end of the last: the larger of `host_ms` and what the
    kernels need."""

    @property
    def is_cheap(self) -> bool:
        """Whether launching it kernel by kernel may stay as it is."""
        return self.host_ms <= max(LAUNCH_MS, LAUNCH_SHARE * self.device_ms)


@dataclass(frozen=True)
class CaptureReport:
    """The cost of capturing, and the measurements that decided which shapes are captured."""

    graphs: int
    seconds: float
    bytes: int
    """Device memory that the graphs' shared pool took."""
    mixed_sizes: tuple[int, ...] = ()
    """Token counts for which mixed steps are captured (`GraphShapes.mixed_sizes`)."""
    mixed_step_tokens: int | None = None
    """Tokens of the short mixed step whose tokens are cheapest (`GraphShapes.limit_mixed_steps`);
    None: all that were timed are short."""
    source: str = ""
    """Where the row of mixed shapes is from (`Choices.used`); "": there is none."""
    eager_steps: tuple[EagerStep, ...] = ()
    """The measurements: launching a larger mixed step takes the CPU little of the time
    for which it keeps the GPU busy (`LAUNCH_SHARE`), so it runs eagerly."""

    def __str__(self) -> str:
        mixed = "mixed steps run eagerly"
        if self.mixed_sizes:
            mixed = f"mixed steps of up to {self.mixed_sizes[-1]} tokens"
        if self.mixed_step_tokens:
            mixed += f", {self.mixed_step_tokens} if few tokens wait"
        mixed += f" ({self.source})" if self.source else ""
        gib = self.bytes / 2**30
        text = f"{self.graphs} graphs in {self.seconds:.1f} s, {gib:.2f} GiB; {mixed}"
        if not self.eager_steps:
            return text
        last = self.eager_steps[-1]
        return (
            f"{text} (at {last.prefill_tokens}, launching takes {last.host_ms:.1f} ms and running "
            f"{last.device_ms:.1f} ms)"
        )


class StepGraphs:
    """Captured steps, by shape and sampling mode.

    Args:
        device: the device that captures.
        without_gather: whether SOFTMAX has graphs of its own.

    Attributes:
        bytes: device memory that captures took so far.
        hidden: by shape, hidden states of the graph of a step that may have log probs of a prompt:
            valid until the next replay. They are the graph's memory, and keep none.
    """

    def __init__(self, device: Device, without_gather: bool = False) -> None:
        self._device = device
        self.hidden: dict[tuple[int, int, int], Tensor] = {}
        own = (SamplingMode.SOFTMAX,) if without_gather else ()
        self._modes = tuple(sorted((*CAPTURED_MODES, *own)))
        self._graphs: dict[tuple[tuple[int, int, int], SamplingMode], Graph] = {}
        self._kinds_run: set[tuple[bool, bool, int, SamplingMode]] = set()
        self.bytes = 0

    @property
    def count(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def measure_mixed_shapes(
        self, shapes: GraphShapes, prepare: Prepare, step: Step
    ) -> tuple[EagerStep, ...]:
        """Find the smallest mixed shape, with the fewest decode rows, whose eager launch takes the
        leader's CPU no more than `LAUNCH_MS` or `LAUNCH_SHARE`; those with as many prefill tokens
        or more are dropped. A launch takes the CPU as long for any tokens, so a few are run: the
        largest, and if that one is cheap, by halves. The measurements up to the one that decided.
        """
        sizes, measured = [*shapes.mixed_sizes.items()], list[EagerStep]()
        low, high, at = 0, len(sizes), len(sizes) - 1
        while low < high:
            tokens, rows = sizes[at]
            measured.append(self._measure(shapes.shape(rows[0], tokens), prepare, step))
            # All ranks pad their steps alike, and measure the same ones.
            if leaders(f"launches of {tokens} tokens", measured[-1].is_cheap):
                high = at
            else:
                low = at + 1
            at = (low + high) // 2
        if high < len(sizes):
            shapes.keep_mixed_up_to(sizes[high][0] - 1)
        last = sizes[min(high, len(sizes) - 1)][0] if sizes else 0
        measured.sort(key=attrgetter("prefill_tokens"))
        return tuple(each for each in measured if each.prefill_tokens <= last)

    def _measure(self, dims: BatchDimensions, prepare: Prepare, step: Step) -> EagerStep:
        work = partial(step, dims, SamplingMode.GREEDY)
        self._time(dims, prepare, work)  # kernels are compiled
        return EagerStep(dims.prefill_tokens, dims.decode_rows, *self._time(dims, prepare, work))

    def _time(
        self, dims: BatchDimensions, prepare: Prepare, work: Callable[[], None]
    ) -> tuple[float, float]:
        """Milliseconds of the host, which launches, and of the device."""
        compute = self._device.compute
        start, end = self._device.event(timing=True), self._device.event(timing=True)
        prepare(dims)
        compute.record(start)
        began = time.perf_counter()
        compute.launch(work)
        host_s = time.perf_counter() - began
        compute.record(end)
        end.wait()
        return host_s * 1e3, end.us_since(start) / 1e3

    def capture(
        self,
        shapes: Sequence[BatchDimensions],
        prepare: Prepare,
        step: Step,
        progress: bool,
        hidden: Hidden = lambda: None,
    ) -> None:
        """Capture every shape in every mode, in the order given.

        Args:
            shapes: padded shapes; smaller ones reuse the memory of larger ones before them.
            prepare: see `Prepare`.
            step: see `Step`.
            progress: show a bar.
            hidden: see `Hidden`; None on a pipeline stage that is not the last.
        """
        before = self._device.memory_in_use()
        jobs = [(dims, mode) for dims in shapes for mode in self._modes_of(dims)]
        for dims, mode in _bar(jobs, "capturing steps", progress):
            work = partial(step, dims, mode)
            kind = dims.decode_rows > 0, dims.prefill_tokens > 0, dims.width, mode
            if kind not in self._kinds_run:
                # Once eagerly: libraries make their workspaces, of the largest size first. Kernels
                # that a smaller shape alone has are compiled and loaded while it is captured.
                prepare(dims)
                self._device.compute.launch(work)
                self._device.release_unused()
                self._kinds_run.add(kind)
            self._graphs[dims.graph_key, mode] = self._device.capture(work)
            # Alive until here, so that nothing else in the graph takes its memory.
            if mode == SamplingMode.PROCESSED and (found := hidden()) is not None:
                self.hidden[dims.graph_key] = self._device.alias(found)
        self.bytes += self._device.memory_in_use() - before

    def time_mixed_shapes(
        self, shapes: GraphShapes, prepare: Prepare, progress: bool = False
    ) -> None:
        """Replay graphs of mixed steps, of as many on each rank, limit such steps by the leader's
        times (`GraphShapes.limit_mixed_steps`), and drop those that are slow
        (`GraphShapes.slow_sizes`)."""
        times = []
        for dims in _bar(shapes.timed_shapes(), "timing steps", progress):
            graph = self._graphs[dims.graph_key, MOST_GENERAL]
            times.append(min(self._replay_ms(graph, dims, prepare) for _ in range(TIMED_REPLAYS)))
        times = leaders("times of mixed steps", times)
        shapes.limit_mixed_steps(times)
        for size in shapes.slow_sizes(times):
            del shapes.mixed_sizes[size]  # steps of so many tokens have the next larger shape

    def missing(self, shapes: Sequence[BatchDimensions]) -> list[BatchDimensions]:
        """The shapes that have no graph yet; graphs of shapes that are not given are dropped."""
        kept = {dims.graph_key for dims in shapes}
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] in kept}
        return [dims for dims in shapes if (dims.graph_key, MOST_GENERAL) not in self._graphs]

    def _replay_ms(self, graph: Graph, dims: BatchDimensions, prepare: Prepare) -> float:
        return self._time(dims, prepare, graph.replay)[1]

    def _modes_of(self, dims: BatchDimensions) -> tuple[SamplingMode, ...]:
        return self._modes if dims.prefill_tokens <= FINE_TOKENS else (MOST_GENERAL,)

    def clear(self) -> None:
        """Drop all graphs and, with them, their memory."""
        self._graphs.clear()
        self.hidden.clear()
        self.bytes = 0

    def find(self, dims: BatchDimensions, mode: SamplingMode) -> Graph | None:
        """The graph for a step of this shape and mode; None where none was captured."""
        if not dims.is_captured:
            return None
        if dims.prefill_tokens > FINE_TOKENS:
            mode = MOST_GENERAL
        elif mode not in self._modes:
            mode = SamplingMode.FILTERED
        return self._graphs.get((dims.graph_key, mode))


def mixed_question(
    context: DynamicInferenceContext, model: nn.Module, vocab_size: int
) -> Question[MixedRow]:
    """The choice of a context's mixed shapes, before any is dropped. By rule all are captured, and
    a short step has `FINE_TOKENS`, if there are longer ones."""
    asked = [*context.graph_shapes.mixed_sizes]

    def check(row: MixedRow) -> None:
        if row.sizes != [size for size in asked if size in row.sizes]:
            raise ValueError(f"its sizes {row.sizes} are none of this engine's")
        if row.step_tokens not in (None, *row.sizes):
            raise ValueError(f"its step_tokens {row.step_tokens} are none of its sizes")

    facts: dict[str, Fact] = {
        "model": type(model).__name__,
        "vocab": vocab_size,
        "dtype": str(context.model_config.params_dtype).removeprefix("torch."),
        "attention": [*context.gpu_view.prefill_backends],
    }
    for owner, names in (context.model_config, DECIDING_TIMES), (context.config, OF_CONFIG):
        found = {name: getattr(owner, name, None) for name in names}
        facts |= {name: value for name, value in found.items() if value}
    tokens = FINE_TOKENS if asked and asked[-1] > FINE_TOKENS else None
    return Question("mixed steps", facts, MixedRow(asked, tokens), check)


def _bar[T](items: Collection[T], what: str, progress: bool) -> Iterable[T]:
    return tqdm(items, desc=what, unit="step", leave=False, disable=None if progress else True)
