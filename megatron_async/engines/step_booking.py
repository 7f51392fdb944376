"""Book a resolved step: its tokens, what ends with it, and what its failure ends."""

from __future__ import annotations

import time

import numpy as np

from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.step_output import StepOutput
from megatron_async.engines.invalidation import Invalidation
from megatron_async.engines.log_prob_booking import book_log_probs, book_prompt_log_probs
from megatron_async.engines.observer import EngineObserver
from megatron_async.engines.request_registry import RequestRegistry
from megatron_async.engines.statistics import EngineStatistics
from megatron_async.errors import NoTokenToChoose, StepFailed
from megatron_async.inference_request import DynamicInferenceRequest, Status
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep
from megatron_async.token_watch import TokenWatch


class StepBooking:
    """Python per event in a request's life, arrays for what every token needs.

    Args:
        context: holds the books.
        requests: the unfinished ones.
        statistics: counts.
        invalidation: is told before a request loses its slot.
        watch: says which tokens may end a request by its text.

    Attributes:
        observer: is told what ends.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        requests: RequestRegistry,
        statistics: EngineStatistics,
        invalidation: Invalidation,
        watch: TokenWatch,
    ) -> None:
        self._context = context
        self._requests = requests
        self._statistics = statistics
        self._invalidation = invalidation
        self._watch = watch
        self.observer = EngineObserver()

    def book(self, step: LaunchedStep) -> StepOutput:
        """Book a step whose samples have arrived; requests that it ends leave the engine."""
        context, tracer = self._context, self._context.tracer
        if step.error is not None:
            self._fail(step, step.error)
        with tracer.range("update_requests", step.plan.step):
            if step.plan.features.num_prompt_log_probs:
                book_prompt_log_probs(step, context.slots)
            output = context.update_requests(step.plan, step.samples, step.log_probs)
        with tracer.range("emit", step.plan.step):
            self._emit(output)
        if context.config.check_integrity:
            context.check_integrity()
        return output

    def release(self, slot: int) -> None:
        """A request has ended: take slot and blocks from it."""
        self._invalidation.before_release(slot)
        self._context.release_request(slot)

    def _emit(self, output: StepOutput) -> None:
        """Stamp first tokens and end what has ended: Python per event, not per token."""
        slots, statistics = self._context.slots, self._statistics
        statistics.resolved_steps += 1
        statistics.generated_tokens += len(output.tokens)
        statistics.zombie_rows += output.zombie_rows
        for slot in output.slots[output.is_first].tolist():  # sync-ok: NumPy
            request = slots.request_at(slot)
            request.ttft = time.perf_counter() - request.arrival_time
        if output.log_probs is not None:
            book_log_probs(output, slots)
        watched = self._watch.is_watched(slots.watch_row[output.slots], output.tokens)
        rows = np.flatnonzero(output.ended | watched)
        places = zip(rows.tolist(), output.slots[rows].tolist(), strict=True)  # sync-ok: NumPy
        for row, slot in places:
            request, error = slots.request_at(slot), None
            try:
                reason = self._finish_reason(request, output, row)
            except Exception as failure:  # of a user's own tokenizer: this request's alone
                reason, error = "error", failure
            if reason is not None:
                self.release(slot)
                self.observer.ended(request, reason)
                status = Status.COMPLETED if error is None else Status.FAILED
                self._requests.end(request, status, reason, error)
        for slot in output.failed_slots.tolist():  # sync-ok: NumPy
            self._end_without_token(slot)

    def _end_without_token(self, slot: int) -> None:
        """The logits of a request left no token to choose: fail it, and no other. What observers
        are told of a step's samples says so."""
        slots, request = self._context.slots, self._context.slots.request_at(slot)
        position, generated = int(slots.num_known[slot]), len(slots.generated(slot))
        grammar = self._requests.get(request.request_id).grammar
        failure = None if grammar is None else grammar.failure
        error = NoTokenToChoose(request.request_id, position, generated, failure)
        self.release(slot)
        self._requests.end(request, Status.FAILED, "error", error)

    def _finish_reason(
        self, request: DynamicInferenceRequest, output: StepOutput, row: int
    ) -> str | None:
        """Why a request ends with this token; None if it goes on."""
        entry = self._requests.get(request.request_id)
        grammar, matcher = entry.grammar, entry.stop_words
        if grammar is not None:
            grammar.accept(int(output.tokens[row]))
        if output.stopped[row]:
            is_termination = output.tokens[row] == request.sampling_params.termination_id
            return "termination_id" if is_termination else "stop_token"
        if matcher is not None:
            generated = self._context.slots.generated(output.slots[row])
            if matcher.end_with(generated, request.sampling_params.min_tokens):
                request.stop_words_from = matcher.counts_from
                return "stop_word"
        if output.ended[row]:
            return "length"
        return "grammar" if grammar is not None and grammar.is_complete else None

    def _fail(self, step: LaunchedStep, cause: BaseException) -> None:
        """The step's own work raised: fail the requests that it served, and no others."""
        error = StepFailed(f"step {step.plan.step} failed: {cause!r}")
        error.__cause__ = cause
        self._statistics.failed_steps += 1
        slots = self._context.slots
        held = slots.generation[step.plan.slots] == step.plan.generations
        for slot in step.plan.slots[held]:
            request = slots.request_at(slot)
            self.release(slot)
            self._requests.end(request, Status.FAILED, "error", error)
