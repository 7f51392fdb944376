"""`DynamicInferenceEngine`: the lifecycle of requests, and the loop.

One loop serves every lookahead: prepare a step, launch it, and resolve the oldest steps until no
more than `lookahead` are in flight. Serial is lookahead 0.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.step_output import StepOutput
from megatron_async.contexts.step_shape import StepShape
from megatron_async.engines.admitting import POLL_S, AdmittingEngine
from megatron_async.engines.arrival import arrival
from megatron_async.engines.follower import Follower, follow
from megatron_async.engines.generation import run_to_end
from megatron_async.engines.invalidation import Invalidation, Reconcile
from megatron_async.engines.new_request import new_request, prepare_request
from megatron_async.engines.observer import EngineObserver
from megatron_async.engines.rank_group import RankGroup
from megatron_async.engines.request_registry import RequestRegistry
from megatron_async.engines.rollback import Rollback
from megatron_async.engines.statistics import EngineStatistics, NoOverlapReason
from megatron_async.engines.step_booking import StepBooking
from megatron_async.engines.step_launching import StepLaunching
from megatron_async.engines.streaming import RequestStream
from megatron_async.engines.validation import check_request_id
from megatron_async.grammar_compiler import GrammarCompiler
from megatron_async.inference_request import DynamicInferenceRequest, Status
from megatron_async.sampling_params import SamplingParams
from megatron_async.text_generation_controllers.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)
from megatron_async.token_watch import TokenWatch

Prompt = str | Sequence[int] | Any
"""Text, or token ids (list, NumPy array or CPU tensor)."""
NO_IDS = np.empty(0, dtype=np.int64)


class DynamicInferenceEngine(AdmittingEngine):
    """Continuous batching with up to `lookahead` steps in flight behind the one being prepared.

    Args:
        controller: runs steps on the device.
        context: schedules them.

    Attributes:
        lookahead: steps that may be unresolved when the next is prepared.
        in_flight: launched steps, oldest first.
        requests: the unfinished ones and who waits for them.
        group: the ranks that hold the model together; at first this one alone.
        invalidation: what becomes of steps in flight when a request of theirs ends.
        launching: launches steps.
        booking: books resolved steps.
    """

    def __init__(
        self, controller: TextGenerationController, context: DynamicInferenceContext
    ) -> None:
        super().__init__()
        self.controller = controller
        self.context = context
        self.lookahead = context.config.steps_in_flight - 1
        self.in_flight: deque[LaunchedStep] = deque()
        self.statistics = EngineStatistics()
        self.requests = RequestRegistry(self.statistics)
        self.invalidation: Invalidation = Reconcile()
        if context.config.invalidation == "rollback":
            self.invalidation = Rollback(context, self.in_flight, self.statistics)
        self.group = RankGroup()
        self.tracer = controller.tracer
        self.grammars = GrammarCompiler(controller.tokenizer, controller.vocab_size)
        self._watch = TokenWatch(controller.tokenizer, controller.vocab_size)
        self.launching = StepLaunching(
            controller, self.in_flight, self.requests, self.statistics, self.invalidation
        )
        self.booking = StepBooking(
            context, self.requests, self.statistics, self.invalidation, self._watch
        )
        controller.create_cuda_graphs()

    @property
    def observer(self) -> EngineObserver:
        """Is told what happens; at first it looks on and does nothing."""
        return self.booking.observer

    @observer.setter
    def observer(self, observer: EngineObserver) -> None:
        self.booking.observer = self.launching.observer = observer

    # ---- Requests ----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
    ) -> asyncio.Future[DynamicInferenceRequest]:
        """Queue a request; it joins the next step that has room, and if it has a grammar that is
        not compiled yet, the first one after that.

        A request that cannot be served fails alone: its status is FAILED, its `error` says why, and
        the next step reports it among the finished.

        Args:
            request_id: the caller's number, unique among unfinished requests.
            prompt: text or token ids.
            sampling_params: copied; defaults when None.
            priority: requests of higher priority are admitted first, get blocks first when they are
                short, and are evicted last; among equals, who came first. Running requests are not
                put off for it.

        Returns:
            a future of the finished (or failed) request, for `await`.

        Raises:
            RequestError: the id is no 64-bit integer, or in use by an unfinished request, which is
                left alone.
            EngineStopped: the engine is closed.
            WrongThread: another thread is at work in the engine. Whatever is raised (Ctrl-C too),
                the request is not added.
        """
        self.thread.check()
        self._check_is_open()
        request = new_request(check_request_id(request_id), prompt, self.controller.tokenizer)
        entry = self.requests.new_entry(request)
        try:
            self._check_has_its_job()
            max_length = prepare_request(
                entry, prompt, sampling_params, priority, self.controller, self.context,
                self.grammars, self._watch,
            )  # fmt: skip
        except Exception as error:
            # Whatever it is, also from a user's own tokenizer, it is this request's alone.
            self.requests.add(entry)
            self.requests.end(request, Status.FAILED, "error", error)
            return entry.future
        self._enter(entry, max_length)
        return entry.future

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """The unfinished request with this id (KeyError if there is none)."""
        return self.requests.get(request_id).request

    def stream(self, request_id: int) -> RequestStream:
        """The tokens and text of an unfinished request as they are booked, for `async for`.

        Raises:
            KeyError: no unfinished request has this id.
        """
        self.thread.check()
        pieces = getattr(self.controller.tokenizer, "byte_pieces", None)
        return self.requests.stream(request_id, self.context.slots, pieces)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has work to do, or ended requests to report."""
        to_report = self.requests.has_ended or self._undelivered or self.in_flight
        if to_report or self._compiling or self.context.has_unfinished_requests():
            return True
        return self.group.others_work or self.group.others_wait

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
            JobFailed: other ranks of the model are lost, and with them all requests; or this one
                follows another.
        """
        self.group.check_leads()
        if self._must_wait():
            self._check_is_running()
        start = time.perf_counter()
        self._tend_grammars()
        if self._only_compiles:
            self._wait_for_a_grammar()
        outputs = []
        step = self.context.next_step
        with self.thread, self._giving_up_with_the_job(), self.tracer.range("step", step):
            launched = self.launch_step()
            for _ in range(self._num_due(launched)):
                outputs += self.resolve_step()
        return self.report(outputs, start)

    async def async_step(self) -> dict[str, Any]:
        """`step_modern` for an event loop: other coroutines run while samples are on their way, or
        while the engine is stopped."""
        self.group.check_leads()
        await self._wait_while_stopped()
        start = time.perf_counter()
        self._tend_grammars()
        if self._only_compiles:
            await asyncio.sleep(POLL_S)
        outputs = []
        step = self.context.next_step
        with self.thread, self._giving_up_with_the_job(), self.tracer.range("step", step):
            launched = self.launch_step()
            for _ in range(self._num_due(launched)):
                oldest = self.in_flight[0]
                with self.tracer.range("resolve", oldest.plan.step):
                    await arrival(oldest.ready, self.group.wait)
                if self._is_closed or not self.in_flight or self.in_flight[0] is not oldest:
                    break  # while this coroutine waited, another one stepped or closed the engine
                outputs += self._book_oldest()
        return self.report(outputs, start)

    async def run_engine(self) -> None:
        """Step whenever there is work, until the task is cancelled or the engine closed.

        Answers come by the futures of `add_request` and by `stream`. Until it ends, the engine is
        for this thread alone: others raise `WrongThread`.
        """
        with self.thread:
            while not self._is_closed:
                with self._giving_up_with_the_job():
                    await self.group.wait_for_work(self.requests)
                while self.has_unfinished_requests() and not self._is_closed:
                    await self.async_step()
                    await asyncio.sleep(0)  # a step whose samples are there already never waits

    # ---- Its parts ---------------------------------------------------------------------------

    def launch_step(self) -> LaunchedStep | None:
        """Prepare the next step and launch it behind those in flight; nothing waits.

        Returns:
            the step; None if none was launched, because the engine is stopped, no request can run
            before a step in flight is resolved (or at all), or more than `lookahead` are in flight.
        """
        self.thread.check()
        if self.is_stopped or self.invalidation.is_draining or self._only_compiles:
            return None
        if len(self.in_flight) > self.lookahead:
            # A wait was interrupted (a cancelled `async_step`, Ctrl-C), or another coroutine is in
            # one: a further step would overwrite buffers that these steps still use.
            return None
        statistics, start = self.statistics, time.thread_time_ns()
        self.group.launching(self.context.next_step)
        with self.tracer.range("prepare_step", self.context.next_step):
            plan = self.context.prepare_step(self._agree)
        statistics.count_prepare(time.thread_time_ns() - start, self.context)
        if plan is None:
            stuck = not self.in_flight and self.context.has_unfinished_requests()
            assert not stuck, "requests are unfinished, but none can run: a bug in scheduling"
            statistics.note_no_overlap(NoOverlapReason.NOTHING_TO_PLAN)
            self.observer.launched(None)
            return None
        return self.launching.launch(plan, self.group, self.lookahead)

    def launch_dummy_step(self) -> LaunchedStep | None:
        """Launch a step without requests, if other ranks need this one's experts; else None."""
        plan = self.context.prepare_dummy_step(self._agree)
        return None if plan is None else self.launching.launch(plan, self.group, self.lookahead)

    def resolve_step(self) -> list[StepOutput]:
        """Wait for the oldest step in flight (IndexError if there is none), and book it.

        Returns:
            its output; nothing if it is discarded.
        """
        self.thread.check()
        oldest = self.in_flight[0]
        with self.tracer.range("resolve", oldest.plan.step):
            self.group.wait(oldest.ready)
        return self._book_oldest()

    def report(self, outputs: list[StepOutput], start: float) -> dict[str, Any]:
        """End a step of the loop: count its time, and tell what has come of it.

        Args:
            outputs: of the steps that it resolved.
            start: when it began, by `time.perf_counter`.

        Returns:
            what `step_modern` does.
        """
        outputs = self._take_undelivered() + outputs
        ended = self.requests.take_ended()
        step_time = time.perf_counter() - start
        self.tracer.collect()
        is_idle = self._only_compiles or not self.has_unfinished_requests()
        self.statistics.count_step_time(step_time, is_idle)
        return {
            "outputs": outputs,
            "active_request_ids": outputs[-1].request_ids if outputs else NO_IDS,
            "finished_request_records": ended,
            "step_time": step_time,
        }

    def _num_due(self, launched: LaunchedStep | None) -> int:
        """How many of the oldest steps in flight are due to be resolved, after `launch_step` has
        returned `launched`."""
        if self._is_closed:
            return 0
        if self.is_stopped or self.invalidation.is_draining:
            return len(self.in_flight)
        at_least = min(len(self.in_flight), 1) if launched is None else 0  # or nothing changes
        return max(len(self.in_flight) - self.lookahead, at_least)

    def _agree(self, step: int, wanted: StepShape, has_work: bool) -> StepShape:
        return self.group.agree(step, wanted, has_work or bool(self._compiling))

    def _book_oldest(self) -> list[StepOutput]:
        """Book the oldest step, whose samples have arrived.

        Returns:
            its output; nothing if it is discarded.
        """
        start = time.thread_time_ns()
        step = self.in_flight.popleft()
        self.group.resolving(step)
        if self.invalidation.discards(step):
            self.launching.give_up_masks()
            return []
        output = self.booking.book(step)
        self.requests.readers.booked(output)
        self.launching.send_masks()
        is_zombie = step.error is None and 0 < output.zombie_rows == step.plan.num_rows
        self.statistics.count_resolve(time.thread_time_ns() - start, is_zombie)
        self.observer.resolved(step)
        if step.error is not None and self.in_flight:
            # The failed step may not have told the device whose blocks are whose. Steps behind it
            # then wrote keys and values by tables of former owners, into blocks of anybody. Their
            # samples are dropped, and all requests are prefilled again, to the same tokens.
            self.context.evict_all()
        return [output]

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
            RequestError: as many sampling_params as prompts were not given.
            EngineStopped: the engine is paused or suspended.
        """
        self._check_is_running()
        with self.thread:
            return run_to_end(self, prompts, sampling_params, on_step)

    def follow(self) -> bool:
        """Do what the leader of this rank's group does, until it releases its followers (the end of
        its `LLM.generate`) or closes its engine.

        Returns:
            whether it goes on: False when it has closed its engine, or if this rank leads.

        Raises:
            JobFailed: a rank died, or did something else than its leader.
        """
        if not isinstance(self.group, Follower):
            return False
        with self._giving_up_with_the_job():
            return follow(self, self.group)

    def stats(self) -> Mapping[str, float | int]:
        """Counters and ratios since the engine was made; docs/statistics.md lists them."""
        return self.statistics.as_dict(self.lookahead, self.context)

    def close(self) -> None:
        """Finish what is launched, free the device's threads, and fail the requests that are
        unfinished, so that nobody waits for them for ever; they keep the tokens that are booked."""
        self.group.close()
        self.context.device.close(wait=self._failure is None)
        self.tracer.collect()
        self.grammars.close()
        self._compiling.clear()
        self._end_for_good()
