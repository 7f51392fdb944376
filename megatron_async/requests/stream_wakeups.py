"""`StreamWakeups`: when the readers of streams are woken.

A reader that is woken at every step costs the event loop a task switch a token, which for many
streams is longer than a step. So readers that wait are woken together, at most every few
milliseconds, and get all tokens booked since. Only the first token of a request and its end are
reported at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

WAKE_EVERY_S = 0.005
"""Seconds between two wake-ups of readers that wait for more tokens."""
WOKEN_A_TURN = 64
"""Requests whose readers are woken in one turn of the event loop: between two turns the engine may
launch a step, so that the device does not idle while many readers run."""
MOST_UNMERGED = 32
"""Steps whose request numbers are stored separately while no event loop runs to wake readers."""


class StreamWakeups:
    """The coroutines that wait for news of a request, all on one thread.

    A step costs the engine the same however many readers wait. One timer serves all of them. It
    runs on the event loop that steps the engine, or, where steps are synchronous, on the
    last reader's.

    Attributes:
        bookings: of steps so far: a reader that has read since the last one need not look again.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._booked: list[NDArray[np.int64]] = []
        """Request numbers with news, an array a step."""
        self._due: deque[int] = deque()
        """Requests whose readers are woken in the next turns."""
        self._readers_loop: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the timer."""
        self._timer: asyncio.Handle | None = None
        self._rests_until = 0.0
        self.bookings = 0

    def waiter(self, request_id: int) -> asyncio.Future[None]:
        """Done when there may be news of an unfinished request. A caller that does not wait to the
        end says so by `gave_up`."""
        self._readers_loop = loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = asyncio.Future(loop=loop)
        self._waiting.setdefault(request_id, []).append(waiter)
        return waiter

    def gave_up(self, request_id: int, waiter: asyncio.Future[None]) -> None:
        """Nobody waits for `waiter` any more."""
        waiters = self._waiting.get(request_id, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[request_id]

    def wake(self, request_id: int) -> None:
        """Wake the readers of a request now: it has its first token, or has ended."""
        for waiter in self._waiting.pop(request_id, ()):
            if not waiter.done():
                try:
                    waiter.set_result(None)
                except RuntimeError:  # the waiter has gone with its event loop
                    if not waiter.get_loop().is_closed():
                        raise

    def wake_all(self) -> None:
        """Wake all readers: each looks for itself whether there is news."""
        self.bookings += 1
        for request_id in list(self._waiting):
            self.wake(request_id)

    def booked(self, request_ids: NDArray[np.int64], is_first: NDArray[np.bool_]) -> None:
        """Tokens of these requests were booked: wake the readers that wait for a first token, and
        have the others woken soon."""
        self.bookings += 1
        if not self._waiting:
            return
        if is_first.any():
            for request_id in request_ids[is_first].tolist():  # sync-ok: NumPy
                self.wake(request_id)
        self._booked.append(request_ids)
        if len(self._booked) > MOST_UNMERGED:
            self._booked = [np.unique(np.concatenate(self._booked))]
        self._set_timer()

    def _set_timer(self) -> None:
        loop = _running_loop() or self._readers_loop
        is_open = loop is not None and not loop.is_closed()
        if self._timer is not None:
            if is_open and loop is self._loop:
                return
            self._timer.cancel()  # of a loop that does not run now, and perhaps never again
        self._loop, self._timer = loop, None
        if loop is None or not is_open:
            while self._booked or self._due:
                self._wake_some()
        else:
            rest = max(self._rests_until - time.monotonic(), 0.0)
            self._timer = loop.call_later(rest, self._wake_in_turns)

    def _wake_in_turns(self) -> None:
        self._timer = None
        self._wake_some()
        if self._due and self._loop is not None:
            self._timer = self._loop.call_soon(self._wake_in_turns)
            return
        self._rests_until = time.monotonic() + WAKE_EVERY_S
        if self._booked:
            self._set_timer()

    def _wake_some(self) -> None:
        if not self._due:
            numbers, self._booked = np.unique(np.concatenate(self._booked)), []
            self._due.extend(numbers.tolist())  # sync-ok: NumPy
        woken = 0
        while self._due and woken < WOKEN_A_TURN:
            request_id = self._due.popleft()
            if request_id in self._waiting:
                woken += 1
                self.wake(request_id)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
