"""`DynamicInferenceEngine`: the lifecycle of requests, and the loop.

One loop serves every lookahead: prepare a step, launch it, and resolve the oldest steps until no
more than `lookahead` are in flight. Serial is lookahead 0.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.step_output import StepOutput
from megatron_async.engines.admission import POLL_S, Admission
from megatron_async.engines.arrival import arrival
from megatron_async.engines.engine_thread import EngineThread
from megatron_async.engines.generation import run_to_end
from megatron_async.engines.job_loss import JobLoss
from megatron_async.engines.listener import EngineListener
from megatron_async.engines.loop import end_turn, num_due, run
from megatron_async.engines.mending import turn_of
from megatron_async.engines.pausing import EngineState, Pausing
from megatron_async.engines.step_booking import StepBooking
from megatron_async.engines.step_launching import StepLaunching
from megatron_async.engines.step_log import StepLog
from megatron_async.engines.step_report import step_report
from megatron_async.names_of_megatron import NamesOfMegatron
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.ranks.follower import follow
from megatron_async.ranks.rank_group import RankGroup
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.requests.streaming import RequestStream
from megatron_async.rollback.policy import make_invalidation
from megatron_async.text.grammar_compiler import GrammarCompiler
from megatron_async.text.token_watch import TokenWatch
from megatron_async.text_generation_controllers.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)

Prompt = str | Sequence[int] | Any
"""Text, or token ids (list, NumPy array or CPU tensor)."""


class DynamicInferenceEngine(NamesOfMegatron):
    """Continuous batching with up to `lookahead` steps in flight while the next one is prepared.

    Args:
        controller: runs steps on the device.
        context: schedules them.

    Attributes:
        lookahead: steps that may be unresolved when another is prepared.
        in_flight: launched steps, oldest first.
        requests: the unfinished requests, with their futures and readers.
        invalidation: the policy for steps in flight when a request that they serve ends.
        group: the ranks that hold the model together; at first only this rank.
        job, pausing: whether ranks of the group are lost; whether the engine is stopped.
        listeners: get the events of requests and steps, in order.
        admission, launching, booking: the stages of a request and of a step.
        thread: the thread that may use the engine now.
        turn: within which its books change; Ctrl-C takes effect between turns, and in waits.
    """

    def __init__(
        self, controller: TextGenerationController, context: DynamicInferenceContext
    ) -> None:
        self.controller = controller
        self.context = context
        self.lookahead = context.config.steps_in_flight - 1
        self.in_flight: deque[LaunchedStep] = deque()
        self.statistics = EngineStatistics.of(context.config)
        self.requests = RequestRegistry(self.statistics)
        self.invalidation = make_invalidation(context, self.in_flight, self.statistics)
        self.group = RankGroup()
        self.thread, self.turn = EngineThread(), turn_of(self)
        self.job = JobLoss(context.slots, self.requests)
        self.pausing, self.tracer = Pausing(), controller.tracer
        steps = StepLog(context, self.statistics, self.requests.traces)
        self.listeners: list[EngineListener] = [steps]
        vocabulary = controller.tokenizer, controller.vocab_size
        self.grammars, watch = GrammarCompiler(*vocabulary), TokenWatch(*vocabulary)
        self.launching = StepLaunching(
            controller, self.in_flight, self.requests, self.statistics, self.invalidation,
            self.listeners,
        )  # fmt: skip
        self.booking = StepBooking(
            context, self.in_flight, self.requests, self.statistics, self.invalidation, watch,
            self.launching, self.listeners,
        )  # fmt: skip
        self.admission = Admission(
            controller, self.requests, self.grammars, watch, self.booking, self.job,
            self.listeners, self.turn,
        )  # fmt: skip
        controller.create_cuda_graphs()

    # ---- Requests ----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        traceparent: str = "",
    ) -> asyncio.Future[DynamicInferenceRequest]:
        """Queue a request. It joins the next step with room; a request with a grammar joins when
        the grammar is compiled.

        A request that cannot be served fails alone: its status is FAILED, its `error` says why, and
        the next step reports it among the finished requests.

        Args:
            request_id: the caller's number, unique among unfinished requests.
            prompt: text or token ids.
            sampling_params: copied; defaults when None.
            priority: higher ones are admitted first, get blocks first when these are short, and are
                evicted last; of equal ones, the earlier first. Admissions never preempt.
            traceparent: of the trace that the log names; see `requests/trace_context.py`.

        Returns:
            a future of the finished (or failed) request, for `await`.

        Raises:
            RequestError: the id is no 64-bit integer, or an unfinished request uses it; that
                request goes on.
            EngineStopped: the engine is closed.
            WrongThread: another thread is at work in the engine. Whatever is raised (Ctrl-C too),
                the request is not added.
        """
        self.thread.check()
        self.pausing.check_is_open()
        group, trace = self.group, traceparent
        return self.admission.add(request_id, prompt, sampling_params, priority, group, trace)

    def abort_request(self, request_id: int) -> None:
        """End an unfinished request now; its rows in flight are dropped when they arrive.

        Raises:
            KeyError: no unfinished request has this id.
            WrongThread: another thread is at work in the engine.
        """
        self.thread.check()
        self.admission.abort(request_id, self.group)

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """The unfinished request with this id (KeyError if there is none)."""
        return self.requests.get(request_id).request

    def stream(self, request_id: int) -> RequestStream:
        """The tokens and text of an unfinished request as they are booked, for `async for`
        (KeyError if there is none)."""
        self.thread.check()
        return self.requests.stream(request_id, self.context.slots, self.controller.tokenizer)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has work to do, or ended requests to report."""
        return self.admission.is_compiling or self._has_other_work

    # ---- The loop ----------------------------------------------------------------------------

    def step_modern(self) -> dict[str, Any]:
        """Launch one step, if there is work, and resolve what is due.

        Returns:
            "outputs": the resolved steps' `StepOutput`s, oldest first;
            "active_request_ids": int64 array, requests with a token in the last of them;
            "finished_request_records": requests that ended since the last step, FAILED ones too;
            "step_time": seconds.

        Raises:
            EngineStopped: the engine is paused, suspended or closed; nothing is left to report.
            WrongThread: another thread is at work in the engine.
            JobFailed: ranks are lost, so all requests have failed; or this rank follows a leader.
        """
        self.group.check_leads()
        self.pausing.check_can_step(self)
        start = time.perf_counter()
        self.admission.tend(self.group)
        if self._only_compiles:
            self.admission.wait_for_a_grammar()
        step = self.context.next_step
        with self.thread.works(), self.job.giving_up(self.group), self.tracer.call(step):
            launched = self.launch_step()
            for _ in range(num_due(self, launched)):
                self.resolve_oldest()
        return end_turn(self, start)

    async def async_step(self) -> dict[str, Any]:
        """`step_modern` for an event loop: other coroutines run during each wait."""
        self.group.check_leads()
        await self.launching.until_due()
        await self.pausing.until_can_step(self)
        start = time.perf_counter()
        self.admission.tend(self.group)
        if self._only_compiles:
            await asyncio.sleep(POLL_S)
        step = self.context.next_step
        with self.thread.works(), self.job.giving_up(self.group), self.tracer.call(step):
            launched = self.launch_step()
            for _ in range(num_due(self, launched)):
                oldest = self.in_flight[0]
                with self.tracer.awaited("resolve", oldest.plan):
                    await arrival(oldest.ready, self.group.wait_async)
                if self.pausing.is_closed or not self.in_flight or self.in_flight[0] is not oldest:
                    break  # while this coroutine waited, another one stepped or closed the engine
                with self.tracer.of_step(oldest.plan), self.turn:
                    self.booking.book_oldest(self.group)
        return end_turn(self, start)

    async def run_engine(self) -> None:
        """Step whenever there is work, until the task is cancelled or the engine closed. Answers
        come by the futures of `add_request` and by `stream`. Until it ends, calls on other threads
        raise `WrongThread`."""
        with self.thread.works():
            await run(self)

    # ---- Its parts ---------------------------------------------------------------------------

    def launch_step(self) -> LaunchedStep | None:
        """Prepare the next step and launch it after those in flight, without waiting.

        Returns:
            the step; None if none was launched: the engine is stopped, no request can run before a
            step in flight is resolved (or at all), or more than `lookahead` are in flight.
        """
        self.thread.check()
        self.turn.make_whole()
        if self.is_stopped or self.invalidation.is_draining or self._only_compiles:
            return None
        if self.booking.is_recovering or len(self.in_flight) > self.lookahead:
            return None  # the latter: a wait was interrupted, or another coroutine is in one
        arguments = self.group, self.lookahead, self.admission.is_compiling
        with self.turn:
            return self.launching.launch_next(*arguments)

    def launch_dummy_step(self) -> LaunchedStep | None:
        """Launch a step without requests, if other ranks need this one's experts; else None."""
        arguments = self.group, self.lookahead, self.admission.is_compiling
        with self.turn:
            return self.launching.launch_dummy(*arguments)

    def resolve_step(self) -> list[StepOutput]:
        """Wait for the oldest step in flight (IndexError if there is none), and book it: its
        output, or nothing if it is discarded."""
        before = len(self.booking.undelivered)
        self.resolve_oldest()
        return self.booking.take_undelivered(before)

    def resolve_oldest(self) -> None:
        """`resolve_step` that leaves the output to the next report."""
        self.thread.check()
        self.turn.make_whole()
        oldest = self.in_flight[0]
        with self.tracer.of_step(oldest.plan):
            with self.tracer.range("resolve", oldest.plan.step):
                self.group.wait(oldest.ready)
            with self.turn:
                self.booking.book_oldest(self.group)

    def report(self, start: float) -> dict[str, Any]:
        """End a turn of the loop that began at `start`, as `step_modern` does."""
        outputs = self.booking.take_undelivered()
        ended, step_time = self.requests.take_ended(), time.perf_counter() - start
        self.tracer.collect()
        self.statistics.count_step_time(step_time, not self._has_other_work)
        return step_report(outputs, ended, step_time)

    def take_back(self, report: dict[str, Any]) -> None:
        """Nobody gets this report: the next one has what it has."""
        self.booking.undelivered[:0] = report["outputs"]
        self.requests.give_back(report["finished_request_records"])

    def forget_ended(self, request_ids: Collection[int]) -> None:
        """No report shall have these requests, if they have ended: nobody waits for them."""
        self.requests.forget(request_ids)

    @property
    def _has_other_work(self) -> bool:
        """Whether there is something to do or to report, beside waiting for grammars."""
        own = bool(self.requests.has_ended or self.booking.undelivered or self.in_flight)
        own = own or self.context.has_unfinished_requests()
        return own or self.group.others_work or self.group.others_wait

    @property
    def _only_compiles(self) -> bool:
        """Whether there is nothing to do until a grammar is there."""
        return self.admission.is_compiling and not self._has_other_work

    # ---- Stopping and going on ---------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """An engine that is paused and suspended is SUSPENDED; it runs when it is neither."""
        return self.pausing.state

    @property
    def is_stopped(self) -> bool:
        """Whether no step may be launched."""
        return self.pausing.is_stopped

    def pause(self) -> None:
        """Launch no further step until `unpause`. On a paused engine, nothing happens.

        Waits for the steps in flight and books their tokens; the next step's report has them.
        During a pause requests may be added and aborted, `async_step` waits, and `step_modern` and
        `generate` raise `EngineStopped`. With experts on other ranks, each rank must call this;
        all ranks stop together.
        """
        self.thread.check()
        self.pausing.pause(self)

    def unpause(self) -> None:
        """Undo `pause`; without one, nothing happens. A suspended engine stays suspended."""
        self.thread.check()
        self.pausing.unpause(self)

    def suspend(self, free_kv_cache: bool = False) -> int:
        """Launch no further step until `resume`, and book the steps in flight as `pause` does.
        `suspend` is independent of `pause`: an engine with both runs after `unpause` and `resume`.

        Args:
            free_kv_cache: free the device memory of the KV cache and of captured graphs, also when
                the engine is suspended already. Running requests are evicted: they keep their
                tokens, and prefill them again after `resume`.

        Returns:
            bytes freed, on a GPU as the driver counts them; 0 if nothing was freed.
        """
        self.thread.check()
        return self.pausing.suspend(self, free_kv_cache)

    def resume(self) -> None:
        """Undo `suspend`: allocate the KV cache and capture graphs again if they were freed, and
        continue. Without a `suspend`, nothing happens. A paused engine stays paused.

        Raises:
            OutOfMemoryError: the cache does not fit any more; the engine stays suspended.
        """
        self.thread.check()
        self.pausing.resume(self)

    def reset_prefix_cache(self) -> None:
        """Forget what KV blocks hold, as after a change of weights (docs/prefix_caching.md)."""
        self.thread.check()
        with self.turn:
            self.group.controlled("reset_prefix_cache")
            self.context.reset_prefix_cache()

    # ---- Conveniences ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Run prompts to their ends.

        Args:
            prompts: texts or token ids.
            sampling_params: for all, or one for each prompt.
            on_step: called with each step's report (progress bars, streaming).

        Returns:
            the requests in the order of `prompts`; a failed one has status FAILED and its `error`.

        Raises:
            RequestError: the number of sampling_params differs from the number of prompts.
            EngineStopped: the engine is paused or suspended.
            Exception: what `on_step` raises; the requests are still there, and go on.
            KeyboardInterrupt, SystemExit: the requests are aborted.
        """
        self.pausing.check_is_running()
        with self.thread.works():
            return run_to_end(self, prompts, sampling_params, on_step)

    def follow(self) -> bool:
        """Repeat the leader's actions until it releases its followers or closes its engine.

        Returns:
            whether it goes on; False also where this rank leads.

        Raises:
            JobFailed: the leader died or gave up, or an action had another result here.
        """
        return follow(self)

    def stats(self) -> Mapping[str, float | int]:
        """Counters and ratios since the engine was made; docs/observing.md lists them."""
        return self.statistics.as_dict(
            self.lookahead, self.context.counters(), self.group.agreement_ns
        )

    def close(self) -> None:
        """Finish launched work, end the device's threads, and fail unfinished requests."""
        self.pausing.close(self)
