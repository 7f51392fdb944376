"""`AnswerStream`: the choices of one streamed answer, written past ASGI as they come; `StreamHub`:
when the streams of an API process are written.

One step of the engine brings tokens for all streams at once. They are written in one pass behind
it, without a task or an event a stream. A few streams are written at once, each token an event of
its own; where a pass has many, a stream is written at most every `EVERY_S`, and what came meanwhile
is joined: a write costs 10 to 25 microseconds of this process' only thread whatever it holds. Where
there are so many streams that writing takes more than a third of the time, they wait longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from megatron_async.server.answers.answer import AnswerChoice
from megatron_async.server.choice_feed import ChoiceFeed
from megatron_async.server.http.answer_connection import AnswerConnection
from megatron_async.server.http.protocol import WRITE_BUFFER_BYTES

PING_EVERY_S = 15.0
"""A stream that is silent for so long says so: proxies cut silent connections off, many after 30
to 60 s."""
STALL_S = 60.0
"""A reader that takes nothing for so long is given up, and its request aborted."""
PING = b": ping\n\n"
EVERY_S = 0.005
"""Time between two writes of a stream while many are busy; more if a pass over all of them takes
more than a `SHARE` of it."""
SHARE = 1 / 3
AT_ONCE = 16
"""Streams of a pass that are written without looking at the clock."""
LONG_S = 0.02
"""After a pass of few streams that took longer, as where each event has all so far, none is written
until the pass was a `SHARE` of the time."""
CHOICES_S = 0.01
"""Processor time of a turn that the choices of one stream may take; others are written later."""
LOOK_EVERY_S = 1.0
"""Seconds between two checks of streams without new tokens."""


class AnswerStream:
    """One streamed answer, which a hub writes.

    Attributes:
        feeds: the readers of its choices.
        has_begun: its head is written. An answer that fails before can still have a status.
        done: done when all is written, when it fails before it has begun, or when nobody reads any
            more. It raises what prevented the first write.
        is_urgent: its first token is there, or its end: it is written now.
        written_at: when it was written last, of the loop's clock.
    """

    def __init__(self, hub: StreamHub, choices: int, abort: Callable[[], None]) -> None:
        self._hub, self._abort = hub, abort
        self._formatters: Sequence[AnswerChoice] = ()
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
        formatters: Sequence[AnswerChoice],
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
        self._go_on()

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
        self._go_on()
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

    def _go_on(self) -> None:
        """After a write."""
        if self._waiting:
            self._hub.goes_on(self)
        elif not self._unended:
            self._hub.discard(self)
            self.done.set_result(None)

    def _news(self) -> bytes:
        """The events of what has come, of as many choices as a turn has time for."""
        end, events = time.thread_time() + CHOICES_S if len(self._waiting) > 1 else 0.0, b""
        while self._waiting:
            feed = next(iter(self._waiting))
            del self._waiting[feed]
            events += self._events_of(feed)
            if self._waiting and time.thread_time() > end:
                return events
        self.is_urgent = False
        return events

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


class StreamHub:
    """Writes streams; on one event loop."""

    def __init__(self) -> None:
        self._open: dict[AnswerStream, None] = {}
        self._due: dict[AnswerStream, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._write_s = 0.0
        """Seconds of a write: an exponential moving average."""
        self._beginning: dict[AnswerStream, None] = {}
        """Streams whose first news came since the last pass."""
        self._num_stalled = 0
        """Streams whose readers were too slow in the last pass."""
        self._rests_until = 0.0
        """Until then no stream is written on: the last pass took long."""

    def add(self, stream: AnswerStream) -> None:
        """From now on the stream is looked at."""
        self._open[stream] = None
        if self._looking is None:
            self._look_later()

    def discard(self, stream: AnswerStream) -> None:
        """The stream has ended."""
        self._open.pop(stream, None)
        self._due.pop(stream, None)
        self._beginning.pop(stream, None)

    def due(self, stream: AnswerStream) -> None:
        """Something came for a stream."""
        self._due[stream] = None

    def goes_on(self, stream: AnswerStream) -> None:
        """A stream has more than it could write in its turn."""
        self._due[stream] = None
        self._write_later(EVERY_S)

    def begins(self, stream: AnswerStream) -> None:
        """A stream's first news are there: its answer begins before other streams are written."""
        self._beginning[stream] = None

    def flush(self) -> None:
        """Write due streams; called after each message of the coordinator."""
        if self._beginning:
            # A first token is an event of its own, and its reader waits longest: its bytes leave
            # before this turn ends, and all others in the next one.
            beginning, self._beginning = self._beginning, {}
            for stream in beginning:
                stream.begin()
            asyncio.get_running_loop().call_soon(self._write_due)
        else:
            self._write_due()

    def _write_due(self) -> None:
        if not self._due:
            return
        now = asyncio.get_running_loop().time()
        if now < self._rests_until:
            self._write_later(self._rests_until - now)
            return
        many = len(self._due) > AT_ONCE
        pass_s = self._write_s * (len(self._due) - self._num_stalled)
        every_s = max(EVERY_S, pass_s / SHARE)
        kept: dict[AnswerStream, None] = {}
        due, self._due = self._due, kept
        begin = time.perf_counter()
        self._num_stalled = 0
        for stream in due:
            if many and not stream.is_urgent and now - stream.written_at < every_s:
                kept[stream] = None
            elif not stream.write(now):
                kept[stream] = None
                self._num_stalled += 1
        pass_s = time.perf_counter() - begin
        if len(due) - len(kept) > AT_ONCE:
            self._write_s += 0.1 * (pass_s / (len(due) - len(kept)) - self._write_s)
        elif pass_s > LONG_S:
            self._rests_until = now + pass_s / SHARE
        if kept:
            self._write_later(every_s)

    def _write_later(self, after_s: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(after_s, self._late)

    def _late(self) -> None:
        self._timer = None
        self._write_due()

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._looking = None
        now = asyncio.get_running_loop().time()
        for stream in list(self._open):
            stream.look(now)
        if self._open:
            self._look_later()
