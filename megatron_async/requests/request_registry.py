"""`RequestRegistry`: unfinished requests, with the futures and streams that wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from megatron_async.errors import RequestAborted, RequestError
from megatron_async.requests.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)
from megatron_async.requests.stream_wakeups import StreamWakeups
from megatron_async.requests.streaming import RequestStream, TokensOf
from megatron_async.requests.traces import TraceLog
from megatron_async.text.stop_words import StopWords
from megatron_async.text.structured_output import TokenGrammar


class Signal:
    """A wake-up call without memory: check what you wait for, then `wait`, then check again.

    Unlike `asyncio.Event` it belongs to no event loop, so an engine can serve several one after
    another, and `notify` may be called where none runs. All on one thread.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def notify(self) -> None:
        """Wake all waiters of now."""
        for waiter in self._waiters:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)


@dataclass
class RequestEntry:
    """An unfinished request with its future, and its stop words and grammar.

    Attributes:
        grammar_job: compiles its grammar; `grammar` is there when the request is admitted.
        is_told: whether `RequestRegistry.on_end` was called, or is being called.
    """

    request: DynamicInferenceRequest
    future: asyncio.Future[DynamicInferenceRequest]
    stop_words: StopWords | None = None
    grammar: TokenGrammar | None = None
    grammar_job: Future[Any] | None = None
    is_told: bool = False


class EndCounts(Protocol):
    """Counters of requests that have ended."""

    finished_requests: int
    failed_requests: int
    aborted_requests: int


class RequestRegistry:
    """Unfinished requests by id, and those that ended since they were last asked for.

    Args:
        counts: of the ends.

    Attributes:
        news: notified when a request is added and when one ends.
        readers: of streams, which wait for tokens.
        traces: logs requests that somebody traces.
        on_end: called with each request as it ends, when all its tokens are stored, and before its
            future and streams end; None: no call.
        compiling: by id, requests that wait for their grammars, outside of the schedule, and the
            lengths at which they end.
        entering: the request that is being added.
    """

    def __init__(self, counts: EndCounts) -> None:
        self._counts = counts
        self.on_end: Callable[[DynamicInferenceRequest], None] | None = None
        self.compiling: dict[int, tuple[RequestEntry, int]] = {}
        self.entering: RequestEntry | None = None
        self._entries: dict[int, RequestEntry] = {}
        self._too_slow: set[int] = set()
        self._ended: list[DynamicInferenceRequest] = []
        self._numbers = count()
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        self._is_closed = False
        self.news = Signal()
        self.readers = StreamWakeups()
        self.traces = TraceLog()

    @property
    def has_ended(self) -> bool:
        """Whether a request has ended that `take_ended` has not returned."""
        return bool(self._ended)

    def __len__(self) -> int:
        """Number of unfinished requests."""
        return len(self._entries)

    def new_entry(self, request: DynamicInferenceRequest) -> RequestEntry:
        """The entry of a request, for `add`; the registry does not contain it before.

        Raises:
            RequestError: an unfinished request has its id.
        """
        self._check_is_free(request.request_id)
        return RequestEntry(request, self._event_loop().create_future())

    def add(self, entry: RequestEntry) -> None:
        """Enter a request.

        Raises:
            RequestError: an unfinished request has its id.
        """
        self._check_is_free(entry.request.request_id)
        self._entries[entry.request.request_id] = entry
        if entry.request.traceparent:
            self.traces.added(entry.request)
        self.wake()

    def has(self, entry: RequestEntry) -> bool:
        """Whether this very request is unfinished."""
        return self._entries.get(entry.request.request_id) is entry

    def withdraw_entering(self) -> int | None:
        """Remove the request that is being added as if it had never been; its id if it was there.
        May be repeated."""
        entry, found = self.entering, None
        if entry is not None and self.has(entry):
            found = entry.request.request_id
            self.compiling.pop(found, None)
            del self._entries[found]
            self.traces.withdrawn(found)
        self.entering = None
        return found

    def _check_is_free(self, request_id: int) -> None:
        if request_id in self._entries:
            raise RequestError(
                f"request id {request_id} is in use by an unfinished request: choose another."
            )

    def wake(self) -> None:
        """A step is due, if only to report: `wait_for_one` returns."""
        self._is_due = True
        self.news.notify()

    async def wait_for_one(self) -> None:
        """Wait until a request has been added since the last wait, or is unfinished, or `wake` was
        called; or until there will be no request any more."""
        while not self._entries and not self._is_due and not self._is_closed:
            await self.news.wait()
        self._is_due = False

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def get(self, request_id: int) -> RequestEntry:
        """The entry of an unfinished request (KeyError if there is none)."""
        return self._entries[request_id]

    def end(
        self,
        request: DynamicInferenceRequest,
        status: Status,
        reason: str,
        error: Exception | None = None,
    ) -> None:
        """A request leaves the engine: its future and streams end, and the next report has it."""
        entry = self._entries[request.request_id]
        request.status, request.error = status, error
        request.latency = time.perf_counter() - request.arrival_time
        request.finish_reason = reason  # from here on it has ended, whatever is raised
        failed = status == Status.FAILED
        kind = DynamicInferenceEventType.FAIL if failed else DynamicInferenceEventType.FINISH
        request.add_event(kind)
        self._counts.failed_requests += failed
        self._counts.aborted_requests += reason == "aborted"
        self._counts.finished_requests += not failed
        self._ended.append(request)
        self._leave(entry)

    def _leave(self, entry: RequestEntry) -> None:
        """Tell the waiters of a request that has ended, and forget it. May be repeated."""
        request = entry.request
        if request.traceparent:
            self.traces.ended(request)
        if self.on_end is not None and not entry.is_told:
            entry.is_told = True
            self.on_end(request)
        if not entry.future.done() and not entry.future.get_loop().is_closed():
            entry.future.set_result(request)
        self._too_slow.discard(request.request_id)
        self.readers.wake(request.request_id)
        self.wake()
        del self._entries[request.request_id]

    def unfinished(self) -> list[DynamicInferenceRequest]:
        """The unfinished requests. Those whose `end` was cut short leave first."""
        for entry in list(self._entries.values()):
            if entry.request.finish_reason is not None:
                if not any(entry.request is request for request in self._ended):
                    self._ended.append(entry.request)
                self._leave(entry)
        return [entry.request for entry in self._entries.values()]

    def is_too_slow(self, request_id: int) -> None:
        """The grammar of an unfinished request holds up the batch."""
        self._too_slow.add(request_id)

    @property
    def has_too_slow(self) -> bool:
        """Whether `take_too_slow` would return one."""
        return bool(self._too_slow)

    def take_too_slow(self) -> set[int]:
        """Requests with such grammars, that are still unfinished."""
        too_slow, self._too_slow = self._too_slow, set()
        return too_slow

    def take_ended(self) -> list[DynamicInferenceRequest]:
        """Requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def give_back(self, ended: list[DynamicInferenceRequest]) -> None:
        """The next `take_ended` returns these, which the last one has returned, too."""
        self._ended[:0] = ended

    def forget(self, request_ids: Collection[int]) -> None:
        """`take_ended` shall not return these, if they have ended: nobody waits for them."""
        self._ended = [each for each in self._ended if each.request_id not in request_ids]

    def stream(self, request_id: int, booked: TokensOf, tokenizer: Any) -> RequestStream:
        """A new stream of an unfinished request.

        Args:
            request_id: of the request.
            booked: holds its tokens while it runs.
            tokenizer: makes the text; None without one.

        Raises:
            KeyError: no unfinished request has this id.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            raise KeyError(
                f"no unfinished request has the id {request_id}: it was never added, was refused, "
                "or has ended; the future of `add_request` tells which."
            )
        return RequestStream(entry.request, booked, self.readers, tokenizer)

    def free_id(self) -> int:
        """The next number that no unfinished request has."""
        return next(number for number in self._numbers if number not in self._entries)

    def fail_all(self, error: Exception, booked: TokensOf) -> None:
        """End every unfinished request with the engine's error; requests keep the tokens that are
        booked."""
        booked.keep_tokens()
        for entry in list(self._entries.values()):
            self.end(entry.request, Status.FAILED, "error", error)

    def close(self, booked: TokensOf) -> None:
        """Fail all unfinished requests, which keep the tokens booked, and close the
        event loop if the registry made it."""
        self._is_closed = True
        booked.keep_tokens()
        for request_id, entry in list(self._entries.items()):
            error = RequestAborted(f"request {request_id}: its engine was closed before it ended")
            self.end(entry.request, Status.FAILED, "aborted", error)
        if self._own_loop is not None:
            self._own_loop.close()
        self.news.notify()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop, or a new one: futures need a loop, steps do not."""
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            if self._own_loop is None:
                self._own_loop = asyncio.new_event_loop()
            return self._own_loop
