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

from megatron_async.contexts.dynamic_context import DynamicInferenceContext, StepOutput
from megatron_async.engines.request_registry import RequestRegistry
from megatron_async.engines.statistics import EngineStatistics, NoOverlapReason
from megatron_async.engines.streaming import RequestStream
from megatron_async.engines.validation import (
    check_params_type,
    check_priority,
    check_request,
    check_request_id,
    prompt_to_array,
    require_detokenizer,
)
from megatron_async.errors import RequestAborted, RequestError, StepFailed
from megatron_async.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)
from megatron_async.profiling.step_log import StepLog
from megatron_async.profiling.timeline import NO_OVERLAP
from megatron_async.sampling_params import SamplingParams
from megatron_async.stop_words import StopWordMatcher
from megatron_async.text_generation_controllers.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)

Prompt = str | Sequence[int] | Any
"""Text, or token ids (list, NumPy array or CPU tensor)."""
NO_IDS = np.empty(0, dtype=np.int64)


class DynamicInferenceEngine:
    """Continuous batching with up to `lookahead` steps in flight behind the one being prepared.

    Args:
        controller: runs steps on the device.
        context: schedules them.

    Attributes:
        lookahead: steps that may be unresolved when the next is prepared.
        in_flight: launched steps, oldest first.
        requests: the unfinished ones and who waits for them.
    """

    def __init__(
        self, controller: TextGenerationController, context: DynamicInferenceContext
    ) -> None:
        self.controller = controller
        self.context = context
        self.lookahead = context.config.steps_in_flight - 1
        self.in_flight: deque[LaunchedStep] = deque()
        self.statistics = EngineStatistics()
        self.requests = RequestRegistry(self.statistics)
        self.tracer = controller.tracer
        self._log = StepLog(context, self.statistics)
        controller.create_cuda_graphs()

    # ---- Requests ----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
    ) -> asyncio.Future[DynamicInferenceRequest]:
        """Queue a request; it joins the next step that has room.

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
        """
        request_id = check_request_id(request_id)
        params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            params = sampling_params.copy()
        # The tokenizer's method, not the controller's: a request that led back to the engine would
        # keep the engine's memory until Python looks for cycles.
        tokenizer = self.controller.tokenizer
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            sampling_params=params,
            detokenizer=None if tokenizer is None else tokenizer.detokenize,
        )
        request.add_event(DynamicInferenceEventType.ADD_ENGINE)
        entry = self.requests.add(request)
        try:
            check_params_type(sampling_params)
            request.priority = check_priority(priority)
            if isinstance(prompt, str):
                prompt = self.controller.tokenize_prompt(prompt, params.add_BOS)
            request.prompt_tokens = prompt_to_array(prompt, self.controller.vocab_size)
            if params.termination_id is None:
                params.termination_id = getattr(self.controller.tokenizer, "eod", None)
            limits = check_request(request, self.context, self.controller.vocab_size)
            if params.stop_words:
                matcher = StopWordMatcher(params.stop_words, require_detokenizer(tokenizer))
                entry.stop_words = matcher
        except Exception as error:
            # Whatever it is, also from a user's own tokenizer, it is this request's alone.
            self.requests.end(request, Status.FAILED, "error", error)
            return entry.future
        self.context.add_request(request, limits.seed, limits.max_length)
        return entry.future

    def abort_request(self, request_id: int) -> None:
        """End an unfinished request now; its rows in flight are dropped when they arrive.

        Raises:
            KeyError: no unfinished request has this id.
        """
        request = self.get_request(request_id)
        if self.context.waiting.remove(request_id) is None:
            self.context.release_request(self._slot_of(request))
        error = RequestAborted(f"request {request_id} was aborted")
        self.requests.end(request, Status.FAILED, "aborted", error)

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """The unfinished request with this id (KeyError if there is none)."""
        return self.requests.get(request_id).request

    def stream(self, request_id: int) -> RequestStream:
        """The tokens and text of an unfinished request as they are booked, for `async for`.

        Raises:
            KeyError: no unfinished request has this id.
        """
        return self.requests.stream(request_id, self._booked_tokens)

    def _booked_tokens(self, request: DynamicInferenceRequest) -> list[int]:
        slots = self.context.slots
        if request.finish_reason is None and request in slots.requests:
            return slots.generated_tokens(self._slot_of(request))
        return request.generated_tokens

    def has_unfinished_requests(self) -> bool:
        """Whether a step has work to do, or ended requests to report."""
        to_report = self.requests.has_ended or bool(self.in_flight)
        return to_report or self.context.has_unfinished_requests()

    def _slot_of(self, request: DynamicInferenceRequest) -> int:
        return self.context.slots.requests.index(request)

    # ---- The loop ----------------------------------------------------------------------------

    def step_modern(self) -> dict[str, Any]:
        """Launch one step, if there is work, and resolve what is due.

        Returns:
            "outputs": the resolved steps' `StepOutput`s, oldest first;
            "active_request_ids": int64 array, requests with a token in the last of them;
            "finished_request_records": requests that ended since the last step, FAILED ones too;
            "step_time": seconds.
        """
        start = time.perf_counter()
        outputs = []
        with self.tracer.range("step", self.statistics.steps):
            for _ in range(self._launch_next()):
                self._wait(self.in_flight[0])
                outputs.append(self._resolve_oldest())
        return self._report(outputs, start)

    async def async_step(self) -> dict[str, Any]:
        """`step_modern` for an event loop: other coroutines run while samples are on their way."""
        start = time.perf_counter()
        outputs = []
        with self.tracer.range("step", self.statistics.steps):
            for _ in range(self._launch_next()):
                oldest = self.in_flight[0]
                if not oldest.ready.query():
                    await asyncio.to_thread(self._wait, oldest)
                if not self.in_flight or self.in_flight[0] is not oldest:
                    break  # while this coroutine waited, another one stepped the engine
                outputs.append(self._resolve_oldest())
        return self._report(outputs, start)

    async def run_engine(self) -> None:
        """Step whenever there is work, until the task is cancelled.

        Answers come by the futures of `add_request` and by `stream`.
        """
        while True:
            await self.requests.wait_for_one()
            while self.has_unfinished_requests():
                await self.async_step()
                await asyncio.sleep(0)  # a step whose samples are there already never waits

    def _launch_next(self) -> int:
        """Prepare and launch one step.

        Returns:
            how many of the oldest steps are due to be resolved: those beyond `lookahead` (if there
            are any from before, nothing is launched); or one, when nothing could be launched,
            because then only a resolve can change that.
        """
        overdue = len(self.in_flight) - self.lookahead
        if overdue > 0:
            # A wait was interrupted (a cancelled `async_step`, Ctrl-C), or another coroutine is in
            # one: a further step would overwrite buffers that these steps still use.
            return overdue
        statistics, clock, start = self.statistics, time.thread_time_ns, time.thread_time_ns()
        with self.tracer.range("prepare_step", statistics.steps):
            plan = self.context.prepare_step()
        prepared = clock()
        statistics.count_prepare(prepared - start, self.context)
        if plan is None:
            stuck = not self.in_flight and self.context.has_unfinished_requests()
            assert not stuck, "requests are unfinished, but none can run: a bug in scheduling"
            statistics.note_no_overlap(NoOverlapReason.NOTHING_TO_PLAN)
            return min(len(self.in_flight), 1)
        with self.tracer.range("transfer_bookkeeping_to_gpu", plan.step):
            self.context.transfer_bookkeeping_to_gpu(plan)
        logged = self._log.begin(plan.step)
        with self.tracer.range("launch_step", plan.step):
            launched = self.controller.launch_step(plan)
        reason = statistics.count_launch(plan, bool(self.in_flight), self.lookahead)
        if reason is not None:
            self.tracer.note(f"{NO_OVERLAP}{reason}", plan.step)
        self._log.end(plan, logged)
        self.in_flight.append(launched)
        statistics.count_launch_time(clock() - prepared)
        return max(len(self.in_flight) - self.lookahead, 0)

    def _wait(self, step: LaunchedStep) -> None:
        """The one wait: until the samples of `step` are on the host."""
        with self.tracer.range("resolve", step.plan.step):
            step.ready.wait()

    def _resolve_oldest(self) -> StepOutput:
        """Book the oldest step, whose samples have arrived."""
        start = time.thread_time_ns()
        step = self.in_flight.popleft()
        if step.error is not None:
            self._fail_step(step)
        with self.tracer.range("update_requests", step.plan.step):
            output = self.context.update_requests(step.plan, step.samples)
        with self.tracer.range("emit", step.plan.step):
            self._emit(output)
        if self.context.config.check_integrity:
            self.context.check_integrity()
        is_discarded = step.error is None and output.zombie_rows == step.plan.num_rows
        self.statistics.count_resolve(time.thread_time_ns() - start, is_discarded)
        return output

    def _emit(self, output: StepOutput) -> None:
        """Stamp first tokens and end what has ended: Python per event, not per token."""
        slots, statistics = self.context.slots, self.statistics
        statistics.resolved_steps += 1
        statistics.generated_tokens += len(output.tokens)
        statistics.zombie_rows += output.zombie_rows
        for row in np.flatnonzero(output.is_first):
            request = slots.request_at(output.slots[row])
            request.ttft = time.perf_counter() - request.arrival_time
        watched = slots.has_stop_words[output.slots]
        for row in np.flatnonzero(output.ended | watched):
            slot, error = output.slots[row], None
            request = slots.request_at(slot)
            try:
                reason = self._finish_reason(request, output, int(row))
            except Exception as failure:  # of a user's own tokenizer: this request's alone
                reason, error = "error", failure
            if reason is not None:
                self.context.release_request(slot)
                status = Status.COMPLETED if error is None else Status.FAILED
                self.requests.end(request, status, reason, error)

    def _finish_reason(
        self, request: DynamicInferenceRequest, output: StepOutput, row: int
    ) -> str | None:
        """Why a request ends with this token; None if it goes on."""
        if output.stopped[row]:
            is_termination = output.tokens[row] == request.sampling_params.termination_id
            return "termination_id" if is_termination else "stop_token"
        matcher = self.requests.get(request.request_id).stop_words
        if matcher is not None and matcher.push(int(output.tokens[row])):
            return "stop_word"
        return "length" if output.ended[row] else None

    def _fail_step(self, step: LaunchedStep) -> None:
        """The step's own work raised: fail the requests that it served, and no others."""
        error = StepFailed(f"step {step.plan.step} failed: {step.error!r}")
        error.__cause__ = step.error
        self.statistics.failed_steps += 1
        slots = self.context.slots
        held = slots.generation[step.plan.slots] == step.plan.generations
        for slot in step.plan.slots[held]:
            request = slots.request_at(slot)
            self.context.release_request(slot)
            self.requests.end(request, Status.FAILED, "error", error)

    def _report(self, outputs: list[StepOutput], start: float) -> dict[str, Any]:
        ended = self.requests.take_ended()
        self.requests.notify_streams()
        step_time = time.perf_counter() - start
        self.tracer.collect()
        self.statistics.count_step_time(step_time, idle=not self.has_unfinished_requests())
        return {
            "outputs": outputs,
            "active_request_ids": outputs[-1].request_ids if outputs else NO_IDS,
            "finished_request_records": ended,
            "step_time": step_time,
        }

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
        """
        if isinstance(sampling_params, Sequence):
            if len(sampling_params) != len(prompts):
                raise RequestError(
                    f"{len(sampling_params)} sampling_params were given for {len(prompts)} "
                    "prompts: give one for all, or one for each."
                )
            each: Sequence[SamplingParams | None] = sampling_params
        else:
            each = [sampling_params] * len(prompts)
        futures = [
            self.add_request(self.requests.free_id(), prompt, params)
            for prompt, params in zip(prompts, each, strict=True)
        ]
        while not all(future.done() for future in futures):
            report = self.step_modern()
            if on_step is not None:
                on_step(report)
        return [future.result() for future in futures]

    def stats(self) -> Mapping[str, float | int]:
        """Counters and ratios since the engine was made; docs/statistics.md lists them."""
        return self.statistics.as_dict(self.lookahead, self.context)

    def close(self) -> None:
        """Finish what is launched, free the device's threads, and fail the requests that are
        unfinished, so that nobody waits for them for ever."""
        self.context.device.close()
        self.tracer.collect()
        self.requests.close()
