"""Book a resolved step: its tokens, and the requests that end with it or fail with it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from megatron_async.engine.listener import EngineListener
from megatron_async.errors import NoTokenToChoose, StepFailed
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.request_slots import RequestSlots
from megatron_async.planning.step_output import StepOutput
from megatron_async.planning.step_plan import IntArray
from megatron_async.requests.inference_request import DynamicInferenceRequest, Status
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.rollback.policy import Invalidation
from megatron_async.step.text_generation_controller import LaunchedStep
from megatron_async.text.token_watch import TokenWatch

End = tuple[int, str, Exception | None]
"""Slot, finish reason, and the error, if any."""
Ending = tuple[DynamicInferenceRequest, Status, str, Exception | None]
"""What `RequestRegistry.end` is called with."""


class StepBooking:
    """Books resolved steps. Work for every token uses arrays; Python code runs only per event of a
    request.

    A step is booked in two parts, between which its output is there for the next report. If the
    first is cut short, no token of the step counts. If the second is, `mend` ends what it was to
    end.

    Args:
        context: the state of requests on the CPU.
        requests: the unfinished requests.
        statistics: counts.
        invalidation: called before a request loses its slot.
        watch: says which tokens may end a request by its text.
        listeners: called with ended requests.

    Attributes:
        undelivered: outputs that no report has had yet, oldest first.
        drafts_before: first step, and end, of those that verify drafts of older weights.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        requests: RequestRegistry,
        statistics: EngineStatistics,
        invalidation: Invalidation,
        watch: TokenWatch,
        listeners: Sequence[EngineListener],
    ) -> None:
        self._context = context
        self._requests = requests
        self._statistics = statistics
        self._invalidation = invalidation
        self._watch = watch
        self._listeners = listeners
        self.undelivered: list[StepOutput] = []
        self.drafts_before = (0, 0)
        self._step: LaunchedStep | None = None
        """The step of which no token is booked yet."""
        self._known: IntArray | None = None
        """`RequestSlots.num_known` before it."""
        self._ending: list[Ending] = []
        """Requests that the step booked last ends."""

    def book(self, step: LaunchedStep) -> StepOutput:
        """Book a step whose samples have arrived; requests that it ends leave the engine."""
        context, tracer = self._context, self._context.tracer
        self._known = context.slots.num_known.copy()
        self._step = step
        if step.error is not None:
            self._fail(step, step.error)
        with tracer.range("update_requests", step.plan.step):
            scored: list[int] = []
            if step.plan.features.num_prompt_log_probs:
                scored = _book_prompt_log_probs(step, context.slots)
            output = context.update_requests(
                step.plan, step.samples, step.counts, step.log_probs, step.drafts
            )
            if output.verified is not None:
                self._statistics.drafts.count(output.verified)
                first, end = self.drafts_before
                if first <= step.plan.step < end:
                    self._statistics.old_drafts.count(output.verified)
        with tracer.range("emit", step.plan.step):
            output = self._emit(output, scored)
        if context.config.check_integrity:
            context.check_integrity()
        return output

    def take_undelivered(self, first: int = 0) -> list[StepOutput]:
        """Outputs that no report has had yet, from the given one on."""
        outputs = self.undelivered[first:]
        del self.undelivered[first:]
        return outputs

    def mend(self, cause: BaseException) -> None:
        """A turn was cut short by `cause`: give requests their booked tokens, fail the requests of
        an unbooked step, and end the requests that a booked one has ended. May be repeated."""
        slots, step = self._context.slots, self._step
        if step is not None and self._known is not None:
            slots.num_known[:] = self._known
            self.undelivered = [each for each in self.undelivered if each.step != step.plan.step]
            self._ending = []
        for request in self._requests.unfinished():
            if (slot := slots.slot_of.get(request.request_id)) is not None:
                request.generated_tokens = slots.generated_tokens(slot)
                self._context.scheduler.keep_routing(slot)
        if step is not None:
            error = _step_failed(step, step.error or cause)
            for slot in self._held_slots(step):
                found = slots.requests[slot]
                if found is not None and found.finish_reason is None:
                    self._requests.end(found, Status.FAILED, "error", error)
            self._statistics.failed_steps += 1
            self._step = None
        for ending in self._ending:
            if ending[0].finish_reason is None:
                self._requests.end(*ending)
        self._ending = []

    def release(self, slot: int) -> None:
        """A request has ended: take slot and blocks from it."""
        self._invalidation.before_release(slot)
        self._context.release_request(slot)

    def _emit(self, output: StepOutput, scored: list[int]) -> StepOutput:
        """Stamp first tokens and end what has ended, the requests in slots `scored` too: Python per
        event, not per token.

        Returns:
            the output, without tokens after a request's end.
        """
        slots, statistics = self._context.slots, self._statistics
        if np.count_nonzero(output.is_first):
            for slot in output.slots[output.is_first].tolist():  # sync-ok: NumPy
                request = slots.request_at(slot)
                request.ttft = time.perf_counter() - request.arrival_time
        output, ends = self._find_ends(output)
        ends += [(slot, "length", None) for slot in scored]
        statistics.resolved_steps += 1
        statistics.generated_tokens += len(output.tokens)
        statistics.zombie_rows += output.zombie_rows
        if output.log_probs is not None:
            _book_log_probs(output, slots)
        self._ending = [
            (
                slots.request_at(slot),
                Status.COMPLETED if error is None else Status.FAILED,
                reason,
                error,
            )
            for slot, reason, error in ends
        ]
        self.undelivered.append(output)
        self._step = None  # from here on the tokens count
        for (slot, reason, _), ending in zip(ends, self._ending, strict=True):
            self.release(slot)
            for listener in self._listeners:
                listener.ended(ending[0], reason)
            self._requests.end(*ending)
        self._ending = []
        gone = {slot for slot, *_ in ends}
        for slot in output.failed_slots.tolist():  # sync-ok: NumPy
            if slot not in gone:
                self._end_without_token(slot)
        return output

    def _find_ends(self, output: StepOutput) -> tuple[StepOutput, list[End]]:
        """Which requests end with this output, and the output up to their ends."""
        slots = self._context.slots
        ends: list[End] = []
        is_due, watch = output.ended, slots.watch_row[output.slots]
        if np.count_nonzero(watch):  # where all are `NOTHING`, the tokens need no look
            watched = self._watch.is_watched(watch[output.rows], output.tokens)
            if np.count_nonzero(watched):
                is_due = is_due.copy()
                is_due[output.rows[watched]] = True
        if not np.count_nonzero(is_due):
            return output, ends
        dropped = np.zeros(len(output.tokens), dtype=np.bool_)
        for row in np.flatnonzero(is_due).tolist():  # sync-ok: NumPy
            slot = int(output.slots[row])
            tokens = np.flatnonzero(output.rows == row)
            request, kept = slots.request_at(slot), len(tokens)
            reason: str | None = None
            error: Exception | None = None
            try:
                reason, kept = self._finish_reason(request, output, row)
            except Exception as failure:  # of a user's own tokenizer: this request's alone
                reason, error = "error", failure
            if reason is None:
                continue
            ends.append((slot, reason, error))
            if error is None and output.verified is not None:
                self._statistics.finished_in_drafted_rows += output.verified.is_drafted(row)
            dropped[tokens[kept:]] = True
            slots.num_known[slot] -= len(tokens) - kept
        return (output.without(dropped) if dropped.any() else output), ends

    def _end_without_token(self, slot: int) -> None:
        """The logits of a request left no token to choose: fail it, and no other. Observers of
        a step's samples see that."""
        slots, request = self._context.slots, self._context.slots.request_at(slot)
        position, generated = int(slots.num_known[slot]), len(slots.generated(slot))
        grammar = self._requests.get(request.request_id).grammar
        failure = None if grammar is None else grammar.failure
        params = request.sampling_params
        bans = ["the grammar (structured_output)"] if grammar is not None else []
        bans += ["bad_words"] if params.bad_words else []
        bans += ["min_tokens"] if generated < params.min_tokens else []
        error = NoTokenToChoose(request.request_id, position, generated, bans, failure)
        self.release(slot)
        self._requests.end(request, Status.FAILED, "error", error)

    def _finish_reason(
        self, request: DynamicInferenceRequest, output: StepOutput, row: int
    ) -> tuple[str | None, int]:
        """Why a request ends with this row, None if it goes on, and how many of its tokens there
        are up to the end."""
        entry = self._requests.get(request.request_id)
        grammar, matcher = entry.grammar, entry.stop_words
        tokens, params = output.tokens_of(row), request.sampling_params
        generated = self._context.slots.generated(output.slots[row])
        before, last = len(generated) - len(tokens), len(tokens) - 1
        for place, token in enumerate(tokens.tolist()):  # sync-ok: NumPy, where an end is due
            if grammar is not None:
                grammar.accept(token)
            if output.stopped[row] and place == last:
                is_termination = token == params.termination_id
                return ("termination_id" if is_termination else "stop_token"), place + 1
            known = generated[: before + place + 1]
            if matcher is not None and matcher.end_with(known, params.min_tokens):
                request.stop_words_from = matcher.counts_from
                return "stop_word", place + 1
            if output.ended[row] and place == last:
                return "length", place + 1
            if grammar is not None and grammar.is_complete:
                return "grammar", place + 1
        return None, len(tokens)

    def _fail(self, step: LaunchedStep, cause: BaseException) -> None:
        """The step's own work raised: fail the requests that it served, and no others."""
        error = _step_failed(step, cause)
        self._statistics.failed_steps += 1
        self._context.step_failed(step.plan)
        for slot in self._held_slots(step):
            request = self._context.slots.request_at(slot)
            self.release(slot)
            self._requests.end(request, Status.FAILED, "error", error)

    def _held_slots(self, step: LaunchedStep) -> list[int]:
        """Slots that requests of a step hold still."""
        plan = step.plan
        held: IntArray = plan.slots[self._context.slots.generation[plan.slots] == plan.generations]
        found: list[int] = held.tolist()  # sync-ok: NumPy
        return found


def _step_failed(step: LaunchedStep, cause: BaseException) -> StepFailed:
    error = StepFailed(f"step {step.plan.step} failed: {cause!r}")
    error.__cause__ = cause
    return error


def _book_log_probs(output: StepOutput, slots: RequestSlots) -> None:
    """Book the generated tokens' log probs: Python per token of rows that asked."""
    assert output.log_probs is not None, "no row of the step asked"
    owners = output.slots[output.rows]
    for token in np.flatnonzero(slots.features[owners] & RowFeature.LOG_PROBS):
        found = slots.request_at(owners[token]).log_probs
        assert found is not None, "its feature says that it asked"
        found.add_generated(output.log_probs[token])


def _book_prompt_log_probs(step: LaunchedStep, slots: RequestSlots) -> list[int]:
    """Book the log probs of prompt tokens that the step's chunks delivered, but for requests that
    lost their slots since. Slots of the requests which that ends."""
    plan, words, place = step.plan, step.prompt_log_probs, 0
    scored: list[int] = []
    for chunk, first, end, _ in plan.features.prompt_spans:
        row, count = plan.num_decode + chunk, end - first
        slot = int(plan.slots[row])
        if slots.generation[slot] == plan.generations[row]:
            found = slots.request_at(slot).log_probs
            assert found is not None, "its slot says that it asked"
            position = int(plan.kv_at_most[row]) - (int(plan.prefill_starts[chunk + 1]) - first)
            found.add_prompt(position, words[place : place + count])
            if not found.num_prompt_missing and slots.is_score(slot):
                scored.append(slot)
        place += count
    return scored
