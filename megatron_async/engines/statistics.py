"""Counters of an engine's life, cheap enough to keep always."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.contexts.step_plan import StepPlan


@dataclass
class EngineStatistics:
    """Counts since the engine was made. Times are nanoseconds of the engine's own thread, waits not
    counted."""

    steps: int = 0
    """Steps launched."""
    resolved_steps: int = 0
    overlapped_steps: int = 0
    """Steps launched before the step before them was resolved."""
    first_steps: int = 0
    """Steps launched on an idle engine: there was no work for a step before them. Also the first
    steps after a pause or a suspend, which waited for the steps before them as they were told."""
    captured_steps: int = 0
    """Steps that replayed a graph; the others launched their kernels one by one."""
    rows: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    zombie_rows: int = 0
    discarded_steps: int = 0
    """Steps launched, taken back and launched again: under the policy "rollback" alone."""
    discarded_rows: int = 0
    """Their rows; zombie rows are counted apart."""
    failed_steps: int = 0
    finished_requests: int = 0
    failed_requests: int = 0
    engine_pauses: int = 0
    engine_suspends: int = 0
    prepare_ns: int = 0
    launch_ns: int = 0
    resolve_ns: int = 0
    busy_s: float = 0.0
    """Seconds spent in steps while there was work."""
    idle: bool = True
    """Whether the last step left nothing to do."""
    drained: bool = False
    """Whether the engine was stopped since the last launch."""

    def count_launch(self, plan: StepPlan, overlapped: bool) -> None:
        """Count a launched step; `overlapped` if another was in flight."""
        self.steps += 1
        self.captured_steps += plan.dims.is_captured
        self.rows += plan.num_rows
        self.prefill_tokens += len(plan.prefill_token_ids)
        self.overlapped_steps += overlapped
        self.first_steps += self.idle or self.drained
        self.idle = self.drained = False

    def count_step_time(self, seconds: float, idle: bool) -> None:
        """Add a step's wall time; `idle` says whether work is left."""
        self.busy_s += seconds
        self.idle = idle

    @property
    def overlap_ratio(self) -> float:
        """Share of steps launched before the step before them was resolved. Steps that began a
        burst of work had none before them and are not counted."""
        return self.overlapped_steps / max(self.steps - self.first_steps, 1)

    def as_dict(self, lookahead: int, pauses: int, evictions: int) -> dict[str, float | int]:
        """The mapping that `engine.stats()` returns."""
        steps = max(self.steps, 1)
        cpu_ns = self.prepare_ns + self.launch_ns + self.resolve_ns
        return {
            "steps": self.steps,
            "lookahead": lookahead,
            "overlap_ratio": self.overlap_ratio,
            "captured_steps": self.captured_steps,
            "rows": self.rows,
            "zombie_rows": self.zombie_rows,
            "discarded_steps": self.discarded_steps,
            "discarded_rows": self.discarded_rows,
            "generated_tokens": self.generated_tokens,
            "prefill_tokens": self.prefill_tokens,
            "tokens_per_second": self.generated_tokens / self.busy_s if self.busy_s else 0.0,
            "busy_seconds": self.busy_s,
            "pauses": pauses,
            "evictions": evictions,
            "finished_requests": self.finished_requests,
            "failed_requests": self.failed_requests,
            "failed_steps": self.failed_steps,
            "engine_pauses": self.engine_pauses,
            "engine_suspends": self.engine_suspends,
            "cpu_us_per_step": cpu_ns / 1e3 / steps,
            "prepare_us_per_step": self.prepare_ns / 1e3 / steps,
            "launch_us_per_step": self.launch_ns / 1e3 / steps,
            "resolve_us_per_step": self.resolve_ns / 1e3 / steps,
        }
