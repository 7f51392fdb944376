"""Serve an arrival trace in virtual time: minutes of a GPU in seconds of a laptop."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import TraceRequest
from megatron_async.lab.device_times import Machine, Work
from megatron_async.lab.model_less import ModelLessEngine
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.simulated_tokens import AnyToken, ForcedDrafts
from megatron_async.lab.trace_server import ServedRequest, ServedTrace, summarize
from megatron_async.lab.workloads import greedy


@dataclass(frozen=True)
class Simulated:
    """A trace served in virtual time."""

    served: ServedTrace
    """Result of `serve_trace`; all tokens are 0."""
    idle_share: float
    """Share of the time with work in which the device was idle between steps."""
    zombie_rows: int
    recomputed_tokens: int
    """Prefilled a second time, after an eviction."""
    most_work: Work
    """Most work of a step, each kind of work separately; see `reach`."""
    gap_p99_ms: float
    """Between the tokens of running requests: 99 % of the steps with decode rows came sooner after
    the step before."""
    drafted_tokens: int
    accepted_tokens: int
    """Right ones among `drafted_tokens`."""
    cpu_us: float
    """Real time of the engine's thread a step, microseconds, on this machine."""

    def figures(self) -> dict[str, Any]:
        """JSON-ready figures, those of `trace_summary.summarize` among them."""
        return {
            **summarize(self.served),
            "idle_share": self.idle_share,
            "zombie_rows": self.zombie_rows,
            "recomputed_tokens": self.recomputed_tokens,
            "most_work": self.most_work,
            "gap_p99_ms": self.gap_p99_ms,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "simulator_cpu_us_per_step": self.cpu_us,
        }


def simulate(
    trace: Sequence[TraceRequest],
    shape: ModelShape,
    config: InferenceConfig,
    machine: Machine,
    on_finish: Callable[[int], None] | None = None,
    forced: Sequence[float] = (),
) -> Simulated:
    """Serve a trace, every request to its full length, on a machine that is only figures.

    Args:
        trace: in order of arrival.
        shape: of the model.
        config: settings of the engine; `num_kv_blocks` or `buffer_size_gb` must be set.
        machine: how long everything takes.
        on_finish: called with the number of requests that a step has finished.
        forced: chances that each draft is right, given those before it were; as many as
            `config.num_speculative_tokens`.

    Raises:
        ConfigurationError: another number of chances.
        RuntimeError: a request failed; it carries the request's error.
    """
    if len(forced) != config.num_speculative_tokens:
        raise ConfigurationError(
            f"chances of {len(forced)} drafts for num_speculative_tokens="
            f"{config.num_speculative_tokens}: a simulation wants a chance for each draft."
        )
    return _Simulation(trace, shape, config, machine, forced).run(on_finish)


@dataclass
class _Times:
    """Microseconds of one request."""

    added: float
    first_token: float = 0.0
    ended: float = 0.0


@dataclass
class _Log:
    """What is noted on the way."""

    times: list[_Times] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    late_us: float = 0.0
    gaps_us: list[float] = field(default_factory=list)
    booked_us: float = 0.0


class _Simulation:
    """One run; the loop is `trace_server.serve_trace`'s, on the virtual clock."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        shape: ModelShape,
        config: InferenceConfig,
        machine: Machine,
        forced: Sequence[float],
    ) -> None:
        self._trace, self._machine = trace, machine
        self._tokens = ForcedDrafts(forced, config.max_requests) if forced else AnyToken()
        self._engine = ModelLessEngine(shape, config, self._tokens, machine)
        self._clock = self._engine.virtual_device.clock
        self._log = _Log()

    def run(self, on_finish: Callable[[int], None] | None) -> Simulated:
        engine, trace, clock, log = self._engine, self._trace, self._clock, self._log
        while len(log.times) < len(trace) or engine.has_unfinished_requests():
            self._add_arrived()
            if not engine.has_unfinished_requests():
                clock.wait_until(1e6 * trace[len(log.times)].arrival_s)
                engine.model_less_controller.engine_was_idle = True
                continue
            self._wait_to_launch()
            report = engine.step_modern()
            self._note(report)
            if on_finish is not None and report["finished_request_records"]:
                on_finish(len(report["finished_request_records"]))
        engine.close()
        return self._result()

    def _wait_to_launch(self) -> None:
        """Let requests arrive until the next launch is due (`InferenceConfig.late_launch`)."""
        clock = self._clock
        while (left_s := self._engine.launching.seconds_left()) > 0:
            due_us, trace, added = clock.now_us + 1e6 * left_s, self._trace, len(self._log.times)
            if added < len(trace):
                due_us = min(due_us, 1e6 * trace[added].arrival_s)
            clock.wait_until(due_us)
            self._add_arrived()

    def _add_arrived(self) -> None:
        trace, clock, log = self._trace, self._clock, self._log
        now = clock.now_us
        while len(log.times) < len(trace) and 1e6 * trace[len(log.times)].arrival_s <= now:
            number = len(log.times)
            request = trace[number]
            log.late_us = max(log.late_us, now - 1e6 * request.arrival_s)
            self._engine.add_request(number, request.prompt, greedy(request.output_tokens))
            clock.spend(self._machine.cpu.add_us)
            log.times.append(_Times(clock.now_us))

    def _note(self, report: dict[str, Any]) -> None:
        now, log = self._clock.now_us, self._log
        log.waiting.append(len(self._engine.context.waiting))
        for output in report["outputs"]:
            if not output.is_first.all():
                log.gaps_us.append(now - log.booked_us)
            log.booked_us = now
            for request_id in output.request_ids[output.is_first]:
                log.times[request_id].first_token = now
        for request in report["finished_request_records"]:
            if request.error is not None:
                raise RuntimeError(f"request {request.request_id} failed") from request.error
            log.times[request.request_id].ended = now

    def _result(self) -> Simulated:
        engine, log, counters = self._engine, self._log, self._engine.statistics
        duration_us, compute = self._clock.now_us, engine.virtual_device.compute
        idle = engine.model_less_controller.idle_us
        served = ServedTrace(
            requests=[self._served(number) for number in range(len(self._trace))],
            duration_s=duration_us / 1e6,
            steps=counters.steps,
            overlap_ratio=counters.overlap_ratio,
            mean_rows=counters.rows / max(counters.steps, 1),
            most_waiting=max(log.waiting, default=0),
            mean_waiting=statistics.fmean(log.waiting) if log.waiting else 0.0,
            late_s=log.late_us / 1e6,
            evictions=engine.context.scheduler.evictions,
            pauses=engine.context.scheduler.pauses,
        )
        prompts = sum(len(request.prompt) for request in self._trace) - self._tokens.cached_tokens
        return Simulated(
            served=served,
            idle_share=idle / max(idle + compute.busy_us, 1e-9),
            zombie_rows=counters.zombie_rows,
            recomputed_tokens=counters.prefill_tokens - prompts,
            most_work=engine.model_less_controller.most_work,
            gap_p99_ms=float(np.percentile(log.gaps_us, 99)) / 1e3 if log.gaps_us else 0.0,
            drafted_tokens=int(engine.stats()["drafted_tokens"]),
            accepted_tokens=int(engine.stats()["accepted_tokens"]),
            cpu_us=float(engine.stats()["cpu_us_per_step"]),
        )

    def _served(self, number: int) -> ServedRequest:
        planned, times = self._trace[number], self._log.times[number]
        arrival = 1e6 * planned.arrival_s
        return ServedRequest(
            queue_s=(self._tokens.first_launched[number] - arrival) / 1e6,
            ttft_s=(times.first_token - arrival) / 1e6,
            latency_s=(times.ended - arrival) / 1e6,
            prompt_tokens=len(planned.prompt),
            tokens=(0,) * planned.output_tokens,
        )
