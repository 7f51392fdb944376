"""The part of an engine by which requests enter it, and leave it before their time.

A request whose grammar is not compiled yet waits outside the engine: neither the scheduler, nor the
ranks that replay its log, nor a recording know of it before its grammar is there.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait

from megatron_async.engines.control import ControllableEngine
from megatron_async.engines.request_registry import RequestEntry
from megatron_async.engines.step_booking import StepBooking
from megatron_async.errors import RequestAborted, RequestError
from megatron_async.grammar_compiler import GrammarCompiler
from megatron_async.inference_request import DynamicInferenceRequest, Status
from megatron_async.structured_output import ALLOWANCE_S, CREDIT_S

POLL_S = 0.005
"""An engine that has nothing but grammars to wait for looks so often whether one is there."""


class AdmittingEngine(ControllableEngine):
    """Admits requests, aborts them, and ends those whose masks cost too much.

    Attributes are those of `DynamicInferenceEngine`.
    """

    booking: StepBooking
    grammars: GrammarCompiler

    def __init__(self) -> None:
        super().__init__()
        self._compiling: dict[int, tuple[RequestEntry, int]] = {}

    def abort_request(self, request_id: int) -> None:
        """End an unfinished request now; its rows in flight are dropped when they arrive.

        Raises:
            KeyError: no unfinished request has this id.
            WrongThread: another thread is at work in the engine.
        """
        self.thread.check()
        error = RequestAborted(f"request {request_id} was aborted")
        self._end_early(self.requests.get(request_id).request, "aborted", error)

    def _enter(self, entry: RequestEntry, max_length: int) -> None:
        """Enter a prepared request, and admit it as soon as its grammar is there. Whatever is
        raised, the request is nowhere then."""
        try:
            self.requests.add(entry)
            self._admit_when_compiled(entry, max_length)
        except BaseException:
            if self.requests.withdraw(entry):
                self._compiling.pop(entry.request.request_id, None)
                self.context.waiting.remove(entry.request.request_id)
            raise

    def _admit_when_compiled(self, entry: RequestEntry, max_length: int) -> None:
        """Admit a request now, if its grammar is there or it has none."""
        job = entry.grammar_job
        if job is None:
            self._admit(entry.request, max_length)
            return
        self._compiling[entry.request.request_id] = entry, max_length
        if job.done():
            self._admit_compiled()
        else:
            self.group.compiling(entry.request)

    def _admit(self, request: DynamicInferenceRequest, max_length: int) -> None:
        self.context.add_request(request, max_length)
        self.observer.added(request)
        self.group.added(request)

    def _admit_compiled(self) -> None:
        """Admit the requests whose grammars are there, and fail those whose grammars are bad."""
        for request_id, (entry, max_length) in list(self._compiling.items()):
            job, request = entry.grammar_job, entry.request
            assert job is not None
            if request.finish_reason is None and not job.done():
                continue
            del self._compiling[request_id]
            if request.finish_reason is not None:
                continue
            try:
                entry.grammar = self.grammars.start(job.result())
            except Exception as error:
                self.requests.end(request, Status.FAILED, "error", error)
            else:
                self._admit(request, max_length)

    def _tend_grammars(self) -> None:
        """Admit who is ready, and end who holds up others. Only where the engine is led: what was
        done is replayed on other ranks, whose clocks differ."""
        if self._compiling:
            self._admit_compiled()
        for request_id in self.requests.take_too_slow():
            entry = self.requests.get(request_id)
            assert entry.grammar is not None
            error = RequestError(
                "structured_output takes too long: computing which tokens may come next is "
                f"{1e3 * entry.grammar.behind_s:.0f} ms behind an allowance of "
                f"{1e3 * ALLOWANCE_S:g} ms of CPU time for each token, and {1e3 * CREDIT_S:g} ms "
                "are allowed, since other requests wait meanwhile: make it less ambiguous and its "
                "repetitions shorter."
            )
            self._end_early(entry.request, "error", error)

    @property
    def _only_compiles(self) -> bool:
        """Whether there is nothing to do until a grammar is there."""
        news = self.in_flight or self._undelivered or self.requests.has_ended
        busy = self.context.has_unfinished_requests()
        others = self.group.others_work or self.group.others_wait
        return bool(self._compiling) and not (news or busy or others)

    def _wait_for_a_grammar(self) -> None:
        jobs = [entry.grammar_job for entry, _ in self._compiling.values() if entry.grammar_job]
        wait(jobs, POLL_S, FIRST_COMPLETED)

    def _end_early(
        self, request: DynamicInferenceRequest, reason: str, error: RequestAborted | RequestError
    ) -> None:
        request_id = request.request_id
        if self._compiling.pop(request_id, None) is None:
            self.group.aborted(request_id)
            self.observer.aborted(request_id)
            if self.context.waiting.remove(request_id) is None:
                self.booking.release(self.context.slots.slot_of[request_id])
        self.requests.end(request, Status.FAILED, reason, error)
