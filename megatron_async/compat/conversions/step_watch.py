"""`StepWatch`: Megatron's counters of steps, kept by listening to our engine."""

from __future__ import annotations

from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    DecodeOnly,
)

from megatron_async.engine.listener import EngineListener
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.planning.step_output import StepOutput
from megatron_async.planning.step_plan import StepPlan
from megatron_async.step.text_generation_controller import LaunchedStep


class StepWatch(EngineListener):
    """A few numbers a step.

    Attributes:
        step_count: steps that were resolved.
        prefill_tokens: tokens that were prefilled.
        with_zombies: of the resolved ones, those with rows of requests that had ended.
        last_plan: of the step launched last; None before the first.
        graph_requests: rows, padding included, of the captured shape of the step resolved last;
            None if it was launched kernel by kernel.
        decode_only: of the last turn of the engine's loop.
    """

    def __init__(self) -> None:
        self._statistics = EngineStatistics()
        self.reset()

    def count_with(self, statistics: EngineStatistics) -> None:
        """Take what an engine counts itself from its `statistics`."""
        self._statistics = statistics
        self.reset()

    def reset(self) -> None:
        """Count from 0."""
        self.step_count = self.prefill_tokens = self.with_zombies = 0
        self._overlapped_before = self._statistics.overlapped_steps
        self.last_plan: StepPlan | None = None
        self.graph_requests: int | None = None
        self.decode_only = DecodeOnly(consumed=None, launched=None)
        self._launched: bool | None = None
        self._consumed: bool | None = None

    @property
    def overlapped(self) -> int:
        """Steps launched while another was in flight."""
        return self._statistics.overlapped_steps - self._overlapped_before

    def launched(self, plan: StepPlan | None) -> None:
        """Count it."""
        if plan is None:
            return
        self.last_plan = plan
        self.prefill_tokens += len(plan.prefill_token_ids)
        self._launched = plan.num_decode == plan.num_rows

    def resolved(self, step: LaunchedStep) -> None:
        """Count it."""
        self.step_count += 1
        plan = step.plan
        self.graph_requests = plan.dims.rows if plan.dims.is_captured else None
        self._consumed = plan.num_decode == plan.num_rows

    def end_turn(self, outputs: list[StepOutput]) -> None:
        """The engine reports; `outputs` are the resolved steps'."""
        self.with_zombies += sum(output.zombie_rows > 0 for output in outputs)
        self.decode_only = DecodeOnly(consumed=self._consumed, launched=self._launched)
        self._launched = self._consumed = None
        if not outputs:
            self.graph_requests = None
