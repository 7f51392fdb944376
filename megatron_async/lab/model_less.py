"""The real engine and context around a device without a model."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from megatron_async.config import InferenceConfig
from megatron_async.device_state.bookkeeping_layout import COUNT, TOKENS
from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.errors import ConfigurationError
from megatron_async.lab.device_times import Machine, Work, work_of
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.virtual_device import VirtualClock, VirtualDevice, VirtualTracer
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.step_plan import IntArray, StepPlan
from megatron_async.step.drafting import Drafter, Drafting
from megatron_async.step.sample_buffers import SampleBuffers
from megatron_async.step.step_graphs import CaptureReport
from megatron_async.step.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)


class TokenSource(Protocol):
    """Says what a step samples."""

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        """Tokens that the plan's rows yield, int32 `[tokens]`, row by row, and how many each row
        does, int32 `[rows]`.

        Called when the step is launched, so that every row's slot is still its request's. What it
        raises fails the step, as a fault of a model's would.
        """
        ...


@runtime_checkable
class DraftSource(Protocol):
    """A token source that also says what a step drafts."""

    def drafts(self, plan: StepPlan) -> IntArray | None:
        """Drafts of the plan's rows for the next step, int32 `[rows, drafts]`, -1 from where on
        there are none; None: none at all. Called behind `sample`."""
        ...


class _NoWeights:
    """What the controller asks of a wrapped model, without one."""

    def __init__(self, context: DynamicInferenceContext, vocab_size: int) -> None:
        self.inference_context = context
        self.vocab_size = vocab_size
        self.shard = None


class _NoDrafts:
    """Stands for a drafter: the token source says how many tokens a row yields."""

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        raise AssertionError("no step computes anything here")


class ModelLessController(TextGenerationController):
    """Runs a step by asking where its tokens come from and how long it takes.

    Launching, events and buffers are the real controller's; only the work inside is replaced.

    Attributes:
        idle_us: time in which the device had nothing to do although the engine had work.
        most_work: of one step, each kind of work by itself.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        vocab_size: int,
        tokens: TokenSource,
        machine: Machine | None = None,
    ) -> None:
        super().__init__(_NoWeights(context, vocab_size))  # type: ignore[arg-type]
        assert isinstance(context.device, VirtualDevice)
        self._virtual = context.device
        self._tokens = tokens
        self._machine = machine
        self._sampled: tuple[IntArray, IntArray] = (np.empty(0, np.int32), np.empty(0, np.int32))
        self._drafts: IntArray | None = None
        self.idle_us = 0.0
        self.most_work: Work = (0, 0, 0)
        self.engine_was_idle = True
        """Set by the engine's driver: what precedes the next step is no idling."""
        self._busy_until_us = 0.0

    def _make_drafting(self, drafter: Drafter | None) -> Drafting | None:
        count = self.context.config.num_speculative_tokens
        return Drafting(_NoDrafts(), count) if count else None

    def create_cuda_graphs(self, progress: bool = False) -> CaptureReport | None:
        """Nothing to capture; but a machine that captures pads its steps to the same shapes."""
        machine, context = self._machine, self.context
        shapes = context.graph_shapes
        if machine is not None and machine.device.captures_graphs:
            shapes.capture_mixed(context.config)
            shapes.keep_mixed_up_to(machine.device.captured_prefill_tokens)
            timed = shapes.timed_shapes()
            shapes.limit_mixed_steps([machine.device.time_us(dims.tokens, 0, 0) for dims in timed])
        return None

    def _run_step(self, plan: StepPlan) -> None:
        self._sampled = self._tokens.sample(plan, self.context)
        self._drafts = None
        if isinstance(self._tokens, DraftSource):
            self._drafts = self._tokens.drafts(plan)
        self._spend(plan)

    def _spend(self, plan: StepPlan) -> None:
        if self._machine is None:
            return
        stream, times = self._virtual.compute, self._machine.device
        if not self.engine_was_idle:
            self.idle_us += stream.free_us - self._busy_until_us
        self.engine_was_idle = False
        work = work_of(plan)
        before = self.most_work
        self.most_work = (
            max(before[0], work[0]), max(before[1], work[1]), max(before[2], work[2]),
        )  # fmt: skip
        stream.spend(times.time_us(*work))
        if times.is_eager(plan.dims):
            # The device runs what is launched so far, and is not done before the last launch.
            self._virtual.clock.spend(self._machine.cpu.eager_launch_us)
            stream.free_us = max(stream.free_us, self._virtual.clock.now_us)
        self._busy_until_us = stream.free_us

    def _deliver(self, launched: LaunchedStep) -> None:
        plan = launched.plan  # no step writes anything here
        self._copy_samples(plan, self._ring[plan.step % len(self._ring)])

    def _transfer_samples_to_cpu(self, plan: StepPlan, buffers: SampleBuffers) -> None:
        tokens, counts = self._sampled
        if len(counts) != plan.num_rows:
            return  # the step failed before it had samples
        rows = plan.device_rows(np.arange(plan.num_rows))
        buffers.array[rows, COUNT] = counts
        within = np.arange(len(tokens)) - np.repeat(counts.cumsum() - counts, counts)
        buffers.array[np.repeat(rows, counts), TOKENS + within] = tokens
        buffers.array[rows, TOKENS + buffers.max_width :] = (
            -1 if self._drafts is None else self._drafts
        )
        if self._machine is not None:
            self._virtual.copy.spend(self._machine.cpu.turnaround_us)


class ModelLessEngine(DynamicInferenceEngine):
    """A `DynamicInferenceEngine` that schedules and books, and computes nothing.

    Args:
        shape: of the model that is not there.
        config: settings of the engine; `device` is not looked at.
        tokens: what steps sample.
        machine: how long steps take, on the virtual clock; None: no time at all.
        clock: the host's time; None: a clock that only moves when told.

    Attributes:
        virtual_device: the device, with the clock.
        model_less_controller: the controller, with its idle time.

    Raises:
        ConfigurationError: neither num_kv_blocks nor buffer_size_gb is set, and there is attention.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: InferenceConfig,
        tokens: TokenSource,
        machine: Machine | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        sizes_pool = config.num_kv_blocks is not None or config.buffer_size_gb is not None
        if shape.num_layers and not sizes_pool:
            raise ConfigurationError(
                "a device without memory has no free memory to size the KV pool by: give "
                "num_kv_blocks or buffer_size_gb."
            )
        captures = machine is not None and machine.device.captures_graphs
        is_cpu = machine is not None and not captures
        self.virtual_device = VirtualDevice(captures, clock, is_cpu)
        context = DynamicInferenceContext(shape, config, self.virtual_device)
        if machine is not None:
            tracer = VirtualTracer(self.virtual_device, self.virtual_device.clock, machine.cpu)
            context.tracer = tracer
        self.model_less_controller = ModelLessController(context, shape.vocab_size, tokens, machine)
        super().__init__(self.model_less_controller, context)
