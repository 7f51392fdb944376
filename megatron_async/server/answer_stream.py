"""`AnswerStream`: the choices of one streamed answer, written past ASGI as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_async.server.choice_feed import ChoiceFeed
from megatron_async.server.http.answer_connection import AnswerConnection
from megatron_async.server.http.protocol import WRITE_BUFFER_BYTES
from megatron_async.server.stream_hub import StreamHub
from megatron_async.serving.messages import Ended
from megatron_async.serving.readers import TokenLogProbs

PING_EVERY_S = 15.0
"""A stream that is silent for so long says so: proxies cut silent connections off, many after 30
to 60 s."""
STALL_S = 60.0
"""A reader that takes nothing for so long is given up, and its request aborted."""
PING = b": ping\n\n"


class ChoiceFormatter(Protocol):
    """Makes the events of one choice."""

    def push(self, tokens: list[int], log_probs: TokenLogProbs | None, text: str | None) -> bytes:
        """Events of new tokens; b"" where all of their text is held back."""

    def end(self, end: Ended) -> bytes:
        """The rest, how the choice ended and, behind the last choice, how the answer did."""


class AnswerStream:
    """One streamed answer; a `HubStream`.

    Attributes:
        feeds: the readers of its choices.
        has_begun: its head is written. An answer that fails before can still have a status.
        done: done when all is written, when it fails before it has begun, or when nobody reads any
            more. It raises what prevented the first write.
        is_urgent, written_at: see `HubStream`.
    """

    def __init__(self, hub: StreamHub, choices: int, abort: Callable[[], None]) -> None:
        self._hub, self._abort = hub, abort
        self._formatters: Sequence[ChoiceFormatter] = ()
        self._first: Callable[[], bytes] | None = None
        self._start: Callable[[bytes], None] | None = None
        self.feeds = [ChoiceFeed(self._hear) for _ in range(choices)]
        self._number_of = {feed: number for number, feed in enumerate(self.feeds)}
        self._waiting: dict[ChoiceFeed, None] = {}
        self._unended = len(self.feeds)
        self._connection: AnswerConnection | None = None
        self._stalled_since: float | None = None
        self.has_begun = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_urgent, self.written_at = False, 0.0

    def open(
        self,
        connection: AnswerConnection,
        start: Callable[[bytes], None],
        formatters: Sequence[ChoiceFormatter],
        first: Callable[[], bytes],
    ) -> None:
        """From now on the answer can be written; what came before is written now. `start` writes
        its head and the first events; `first` makes the events before all others."""
        self._start, self._formatters, self._first = start, formatters, first
        self._connection = connection
        if self._waiting:
            self.begin()

    def begin(self) -> None:
        """Something has come: write the answer's head with it, in one write. No task is woken for
        it. Never raises."""
        if self._connection is None or self.has_begun or self.done.done():
            return
        if self._connection.is_gone:
            self.give_up()
            return
        for feed in self.feeds:
            if feed.end is not None and feed.end.failure is not None:
                self.done.set_result(None)
                return
        try:
            assert self._start is not None, "set with the connection"
            assert self._first is not None, "likewise"
            self._start(self._first() + self._news())
        except Exception as error:  # of this answer alone; others are begun and written after it
            self.done.set_exception(error)
            return
        self.has_begun = True
        self.written_at = asyncio.get_running_loop().time()
        if self._unended:
            self._hub.add(self)
        else:
            self.done.set_result(None)

    def give_up(self) -> None:
        """Nobody reads any more, or the process ends: abort what is not ended."""
        self._hub.discard(self)
        if self._unended:
            self._abort()
        if not self.done.done():
            self.done.set_result(None)

    def write(self, now: float) -> bool:
        """Write what has come; False if the reader must read first. Never raises."""
        connection = self._connection
        if connection is None or not self.has_begun or self.done.done():
            return True
        if connection.is_gone:
            self.give_up()
            return True
        if connection.unread_bytes > WRITE_BUFFER_BYTES:
            # Tokens wait as numbers: a reader that stalls costs 4 bytes a token, and no time.
            self._stalled_since = self._stalled_since or now
            return False
        self._stalled_since = None
        try:
            data = self._news()
        except Exception as error:  # of this answer alone; others are written after it
            self.done.set_exception(error)
            self.give_up()
            return True
        if data:
            connection.write_chunk(data)
            self.written_at = now
        if not self._unended:
            self._hub.discard(self)
            self.done.set_result(None)
        return True

    def look(self, now: float) -> None:
        """Ping into a silence; cut off a reader that has stalled for too long."""
        connection = self._connection
        if connection is None or connection.is_gone:
            return
        if self._stalled_since is not None and now - self._stalled_since > STALL_S:
            connection.cut_off()  # which gives this stream up
        elif connection.unread_bytes == 0 and now - self.written_at > PING_EVERY_S:
            connection.write_chunk(PING)
            self.written_at = now

    def _news(self) -> bytes:
        """The events of what has come."""
        waiting, self._waiting = self._waiting, {}
        self.is_urgent = False
        return b"".join(map(self._events_of, waiting))

    def _events_of(self, feed: ChoiceFeed) -> bytes:
        formatter = self._formatters[self._number_of[feed]]
        events = formatter.push(*feed.take()) if feed.has_news else b""
        if feed.end is not None:
            self._unended -= 1
            events += formatter.end(feed.end)
        return events

    def _hear(self, feed: ChoiceFeed, is_urgent: bool) -> None:
        self._waiting[feed] = None
        self.is_urgent |= is_urgent
        if self.has_begun:
            self._hub.due(self)
        elif feed.end is None or feed.end.failure is None:
            self._hub.begins(self)
        elif not self.done.done():  # its task tells of it, also where no message brought it
            self.done.set_result(None)
