"""`StreamHub`: when the streams of an API process are written.

One step of the engine brings tokens for all streams at once. They are written in one pass behind
it, without a task or an event a stream. A few streams are written at once, each token an event of
its own; where a pass has many, a stream is written at most every `EVERY_S`, and what came meanwhile
is joined: a write costs 10 to 25 microseconds of this process' only thread whatever it holds. Where
there are so many streams that writing takes more than a third of the time, they wait longer.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

EVERY_S = 0.005
"""Time between two writes of a stream while many are busy; more if a pass over all of them takes
more than a `SHARE` of it."""
SHARE = 1 / 3
AT_ONCE = 16
"""Streams of a pass that are written without looking at the clock."""
LOOK_EVERY_S = 1.0
"""Seconds between two checks of streams without new tokens."""


class HubStream(Protocol):
    """A stream that the hub writes.

    Attributes:
        is_urgent: its first token is there, or its end: it is written now.
        written_at: when it was written last, of the loop's clock.
    """

    is_urgent: bool
    written_at: float

    def write(self, now: float) -> bool:
        """Write what there is; False if its reader is too slow for it now."""

    def begin(self) -> None:
        """Begin the answer, if that can be done now; never raises."""

    def look(self, now: float) -> None:
        """Once in a while: say something into a long silence, give up a reader that stalls."""


class StreamHub:
    """Writes streams; on one event loop."""

    def __init__(self) -> None:
        self._open: dict[HubStream, None] = {}
        self._due: dict[HubStream, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._write_s = 0.0
        """Seconds of a write: an exponential moving average."""
        self._beginning: dict[HubStream, None] = {}
        """Streams whose first news came since the last pass."""
        self._num_stalled = 0
        """Streams whose readers were too slow in the last pass."""

    def add(self, stream: HubStream) -> None:
        """From now on the stream is looked at."""
        self._open[stream] = None
        if self._looking is None:
            self._look_later()

    def discard(self, stream: HubStream) -> None:
        """The stream has ended."""
        self._open.pop(stream, None)
        self._due.pop(stream, None)
        self._beginning.pop(stream, None)

    def due(self, stream: HubStream) -> None:
        """Something came for a stream."""
        self._due[stream] = None

    def begins(self, stream: HubStream) -> None:
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
        many = len(self._due) > AT_ONCE
        pass_s = self._write_s * (len(self._due) - self._num_stalled)
        every_s = max(EVERY_S, pass_s / SHARE)
        kept: dict[HubStream, None] = {}
        due, self._due = self._due, kept
        begin = time.perf_counter()
        self._num_stalled = 0
        for stream in due:
            if many and not stream.is_urgent and now - stream.written_at < every_s:
                kept[stream] = None
            elif not stream.write(now):
                kept[stream] = None
                self._num_stalled += 1
        if len(due) - len(kept) > AT_ONCE:
            took_s = (time.perf_counter() - begin) / (len(due) - len(kept))
            self._write_s += 0.1 * (took_s - self._write_s)
        if kept and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(every_s, self._late)

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
