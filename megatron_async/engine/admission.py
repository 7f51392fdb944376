"""`Admission`: how requests enter an engine, and how an abort ends them early.

A request whose grammar is not compiled yet waits outside of the schedule: the scheduler, the ranks
that replay the leader's log, and recordings learn of the request only when its grammar is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron_async.engine.step_loop import StepLoop
from megatron_async.engine.validation import (
    check_params_type,
    check_priority,
    check_request,
    check_request_id,
    prompt_to_array,
    require_detokenizer,
)
from megatron_async.errors import RequestAborted, RequestError
from megatron_async.interrupts import HeldInterrupts
from megatron_async.requests.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)
from megatron_async.requests.log_probs import RequestLogProbs
from megatron_async.requests.moved_request import MOVED, MovedRequest
from megatron_async.requests.request_registry import RequestEntry
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.requests.sampling_record import sampling_record
from megatron_async.step.text_generation_controller import (
    TextGenerationController,
)
from megatron_async.text.grammar_compiler import GrammarCompiler
from megatron_async.text.structured_output import ALLOWANCE_S, CREDIT_S, StructuredOutput
from megatron_async.text.token_watch import EVERYTHING, TokenWatch
from megatron_async.text.tokenizer import INTERRUPTS

NO_TOKENS = np.empty(0, dtype=np.int32)
POLL_S = 0.005
"""Seconds between two checks of an engine that only waits: for grammars to be compiled, or for the
weights of other ranks."""


class Admission:
    """Admits requests, aborts them, and ends those whose masks cost too much.

    Args:
        controller: has the tokenizer; its context schedules admitted requests.
        grammars: compiles grammars.
        watch: gets the stop words of new requests.
        loop: requests enter and leave between its steps, and its group logs that.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        grammars: GrammarCompiler,
        watch: TokenWatch,
        loop: StepLoop,
    ) -> None:
        self._controller = controller
        self._context = controller.context
        self._grammars = grammars
        self._watch = watch
        self._loop = loop
        self._requests = loop.requests
        self._turn = loop.turn

    def add(
        self,
        request_id: int,
        prompt: Any,
        sampling_params: SamplingParams | None,
        priority: int,
        traceparent: str = "",
        moved: MovedRequest | None = None,
    ) -> asyncio.Future[DynamicInferenceRequest]:
        """Add a request (`DynamicInferenceEngine.add_request`), with what it had where it moved
        from."""
        controller = self._controller
        checked_id = check_request_id(request_id)
        request = _new_request(
            checked_id, prompt, sampling_params, controller.tokenizer, traceparent
        )
        entry = self._requests.new_entry(request)
        try:
            self._loop.check_not_lost()
            max_length = _prepare_request(
                entry, prompt, sampling_params, priority, controller, self._grammars, self._watch
            )
            if moved is not None:
                _restore(entry, moved, controller.vocab_size)
        except Exception as error:
            # Whatever it is, also from a user's own tokenizer, it is this request's alone.
            with self._turn:
                self._requests.add(entry)
                self._requests.end(request, Status.FAILED, "error", error)
            return entry.future
        try:
            with self._turn:
                self._enter(entry, max_length)
        except BaseException:
            self._forget(entry)  # it is there if Ctrl-C took effect at the turn's end
            raise
        return entry.future

    def _forget(self, entry: RequestEntry) -> None:
        """A request whose caller is told that it was not added leaves no trace."""
        if self._requests.has(entry):
            entry.future.cancel()  # nobody waits
            self.abort(entry.request.request_id)
            self._requests.forget([entry.request.request_id])

    def abort(self, request_id: int) -> None:
        """Abort a request (`DynamicInferenceEngine.abort_request`)."""
        error = RequestAborted(f"request {request_id} was aborted")
        with self._turn:
            self._end_early(self._requests.get(request_id).request, "aborted", error)

    def export(self, request_id: int) -> MovedRequest:
        """End a request with what another engine goes on with
        (`DynamicInferenceEngine.export_request`)."""
        with self._turn:
            request, slots = self._requests.get(request_id).request, self._context.slots
            slot = slots.slot_of.get(request_id)
            tokens = request.generated_tokens if slot is None else slots.generated_tokens(slot)
            found = MovedRequest.of(request, tokens)
            self._end_early(request, MOVED, None)
        return found

    def tend(self) -> None:
        """Admit requests that are ready, and end requests that delay others. Only on the leader:
        other ranks, whose clocks differ, replay its actions."""
        if not self._requests.compiling and not self._requests.has_too_slow:
            return
        with self._turn:
            self._admit_compiled()
            for request_id in self._requests.take_too_slow():
                entry = self._requests.get(request_id)
                assert entry.grammar is not None
                error = RequestError(
                    "structured_output takes too long: computing which tokens may come next is "
                    f"{1e3 * entry.grammar.behind_s:.0f} ms behind an allowance of "
                    f"{1e3 * ALLOWANCE_S:g} ms of CPU time for each token, and "
                    f"{1e3 * CREDIT_S:g} ms are allowed, since other requests wait meanwhile: make "
                    "it less ambiguous and its repetitions shorter."
                )
                self._end_early(entry.request, "error", error)

    def wait_for_others(self) -> None:
        """Until a grammar is there, or for `POLL_S`, at whose end Ctrl-C takes effect: `wait` locks
        the jobs, and would leave them locked."""
        jobs = [
            entry.grammar_job for entry, _ in self._requests.compiling.values() if entry.grammar_job
        ]
        with HeldInterrupts():
            if jobs:
                wait(jobs, POLL_S, FIRST_COMPLETED)
            else:
                time.sleep(POLL_S)

    def _enter(self, entry: RequestEntry, max_length: int) -> None:
        """Enter a prepared request, and admit it as soon as its grammar is there. Whatever is
        raised, the request is nowhere then."""
        try:
            self._requests.entering = entry
            self._requests.add(entry)
            job = entry.grammar_job
            if job is None:
                self._admit(entry.request, max_length)
            else:
                self._requests.compiling[entry.request.request_id] = entry, max_length
                if job.done():
                    self._admit_compiled()
                else:
                    self._loop.group.compiling(entry.request)
            self._requests.entering = None
        except BaseException:
            if (request_id := self._requests.withdraw_entering()) is not None:
                self._context.waiting.remove(request_id)
            raise

    def _admit(self, request: DynamicInferenceRequest, max_length: int) -> None:
        version = self._context.scheduler.weight_version
        if request.num_moved:
            request.version_lag += request.weights.tokens[-1][1] != version
        is_whole = request.sampling_params.is_score and not request.prompt_log_probs_missing
        if is_whole or request.is_stale:
            self._requests.end(request, Status.COMPLETED, "length" if is_whole else "stale")
            return
        if request.num_moved:
            request.weights.change(version, request.num_moved, None)
        else:
            request.weights.begin(version)
        self._context.add_request(request, max_length)
        for listener in self._loop.listeners:
            listener.added(request)
        self._loop.group.added(request)

    def _admit_compiled(self) -> None:
        """Admit requests whose grammars are ready, and fail those whose grammars are invalid."""
        for request_id, (entry, max_length) in list(self._requests.compiling.items()):
            job, request = entry.grammar_job, entry.request
            assert job is not None
            if request.finish_reason is None and not job.done():
                continue
            if request.finish_reason is None:
                try:
                    entry.grammar = self._grammars.start(job.result())
                    entry.grammar.replay(request.generated_tokens)
                except Exception as error:
                    self._requests.end(request, Status.FAILED, "error", error)
                else:
                    self._admit(request, max_length)
            del self._requests.compiling[request_id]

    def _end_early(
        self,
        request: DynamicInferenceRequest,
        reason: str,
        error: RequestAborted | RequestError | None,
    ) -> None:
        """End an unfinished request, wherever it is; with an error, it fails."""
        request_id = request.request_id
        if self._controller.stage.returns_samples:
            request.routing = None  # or it would be shared before other stages know of the end
        if self._requests.compiling.pop(request_id, None) is None:
            self._loop.group.aborted(request_id)
            for listener in self._loop.listeners:
                listener.aborted(request_id)
            if self._context.waiting.remove(request_id) is None:
                self._loop.booking.release(self._context.slots.slot_of[request_id])
        status = Status.COMPLETED if error is None else Status.FAILED
        self._requests.end(request, status, reason, error)


def _restore(entry: RequestEntry, moved: MovedRequest, vocab_size: int) -> None:
    """Give a request that is prepared what it had where it moved from.

    Raises:
        RequestError: that does not fit.
    """
    request, params = entry.request, entry.request.sampling_params
    tokens = prompt_to_array(moved.generated, vocab_size) if moved.generated else NO_TOKENS
    request.prompt = moved.text
    moved.restore(request, tokens, vocab_size)
    for end in range(1, len(tokens) + 1 if entry.stop_words is not None else 1):
        assert entry.stop_words is not None
        if entry.stop_words.end_with(tokens[:end], params.min_tokens):
            raise RequestError(f"the moved request has ended with a stop word at token {end}.")


def _new_request(
    request_id: int, prompt: Any, given_params: Any, tokenizer: Any, traceparent: str = ""
) -> DynamicInferenceRequest:
    """A request of which nothing is checked yet but its id and its trace. Parameters that are given
    are the caller's until `_prepare_request` copies them."""
    request = DynamicInferenceRequest(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        sampling_params=(
            given_params if isinstance(given_params, SamplingParams) else SamplingParams()
        ),
        # The tokenizer's method, not the controller's: a request that led back to the engine would
        # keep the engine's memory until Python looks for cycles.
        detokenizer=None if tokenizer is None else tokenizer.detokenize,
        traceparent=traceparent,
    )
    request.add_event(DynamicInferenceEventType.ADD_ENGINE)
    return request


@contextmanager
def _panics_as_request_errors() -> Iterator[None]:
    """Libraries written in Rust panic: their error is no `Exception`."""
    try:
        yield
    except (Exception, *INTERRUPTS):
        raise
    except BaseException as panic:
        raise RequestError(
            f"the request could not be prepared: {type(panic).__name__}: {panic}. Change its "
            "prompt or sampling_params."
        ) from panic


@_panics_as_request_errors()
def _prepare_request(
    entry: RequestEntry,
    prompt: Any,
    given_params: Any,
    priority: Any,
    controller: TextGenerationController,
    grammars: GrammarCompiler,
    watch: TokenWatch,
) -> int:
    """Check what the caller gave, and fill in the entry and its request.

    Args:
        entry: of a new request.
        prompt: text or token ids.
        given_params: the sampling parameters as they were given.
        priority: as it was given.
        controller: for its tokenizer and vocabulary, and for the limits of its context.
        grammars: for its tokenizer.
        watch: likewise.

    Returns:
        the sequence length, tokens, at which the request ends.

    Raises:
        RequestError: the request can never be served, or a library written in Rust panicked; other
            exceptions come from a user's own tokenizer.
    """
    request, tokenizer = entry.request, controller.tokenizer
    check_params_type(given_params)
    if given_params is not None:
        request.sampling_params = given_params.copy()
    params, vocab_size = request.sampling_params, controller.vocab_size
    request.priority = check_priority(priority)
    if isinstance(prompt, str):
        prompt = controller.tokenize_prompt(prompt, params.add_BOS)
    request.prompt_tokens = prompt_to_array(prompt, vocab_size)
    if params.termination_id is None:
        params.termination_id = getattr(tokenizer, "eod", None)
    limits = check_request(request, controller.context, vocab_size)
    length = len(request.prompt_tokens)
    request.record = sampling_record(
        params,
        seed=limits.seed,
        prompt_length=length,
        max_length=limits.max_length,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        drafts=limits.drafts,
    )
    if params.return_log_probs:
        wanted = 0 if params.skip_prompt_log_probs else length
        top_n, first = min(params.top_n_logprobs, vocab_size), params.prompt_log_probs_from
        request.log_probs = RequestLogProbs(top_n, wanted, first)
    if params.stop_words:
        entry.stop_words, request.watch_row = watch.stop_words(
            params.stop_words, require_detokenizer(tokenizer)
        )
    if params.structured_output is not None:
        if isinstance(params.structured_output, StructuredOutput):
            params.structured_output = params.structured_output.fixed()
        entry.grammar_job = grammars.begin(params.structured_output)
        request.watch_row = EVERYTHING
    return limits.max_length
