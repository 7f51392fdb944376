"""When streams are written: a few at once, many together, and never a loop or a task a stream."""

import asyncio

import pytest

from megatron_async.server import answer_stream
from megatron_async.server.answer_stream import AT_ONCE, EVERY_S, StreamHub
from tests.support.patience import TIME, Clock, run_virtually


class Stream:
    def __init__(self, takes=True):
        self.is_urgent, self.written_at, self.writes, self.takes = False, -1.0, [], takes
        self.looks = self.begins = 0

    def begin(self):
        self.begins += 1

    def write(self, now):
        if self.takes:
            self.writes.append(now)
            self.written_at = now
            self.is_urgent = False
        return self.takes

    def look(self, now):
        self.looks += 1


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(answer_stream, "time", TIME)


def played(play):
    async def main():
        await play(StreamHub())

    run_virtually(main())


def test_a_few_are_written_at_once():
    async def play(hub):
        streams = [Stream() for _ in range(AT_ONCE)]
        for step in range(3):
            for stream in streams:
                hub.due(stream)
            hub.flush()
            assert {len(stream.writes) for stream in streams} == {step + 1}

    played(play)


def test_many_are_written_together():
    """Each at most every 5 ms, and none is forgotten when nothing follows. Break it: `flush`
    without its timer."""

    async def play(hub):
        streams = [Stream() for _ in range(AT_ONCE + 1)]
        for _ in range(4):
            for stream in streams:
                hub.due(stream)
            hub.flush()
        assert {len(stream.writes) for stream in streams} == {1}
        streams[0].is_urgent = True
        hub.due(streams[0])
        hub.flush()
        assert len(streams[0].writes) == 2
        await asyncio.sleep(3 * EVERY_S)
        assert {len(stream.writes) for stream in streams[1:]} == {2}
        gaps = [b - a for stream in streams[1:] for a, b in zip(stream.writes, stream.writes[1:])]
        assert min(gaps) == pytest.approx(EVERY_S)

    played(play)


def test_costly_writes_are_rarer():
    """Writing takes at most a third of the time, however many streams there are. Break it: `every_s
    = EVERY_S`."""

    class Costly(Stream):
        def write(self, now):
            Clock.now += 0.0005
            return super().write(now)

    async def play(hub):
        streams = [Costly() for _ in range(2 * AT_ONCE)]
        until = Clock.now + 1.5
        while Clock.now < until:
            for stream in streams:
                hub.due(stream)
            hub.flush()
            await asyncio.sleep(0.002)
        # A pass takes 16 ms: every 48 ms, once its cost is known.
        gaps = [b - a for stream in streams for a, b in zip(stream.writes[-6:], stream.writes[-5:])]
        assert 0.045 < min(gaps) <= max(gaps) < 0.07

    played(play)


def test_a_few_that_take_long_leave_time_for_others():
    """Messages that came meanwhile are joined. Break it: leave `_rests_until` as it is."""

    class Large(Stream):
        def write(self, now):
            Clock.now += 0.1
            return super().write(now)

    async def play(hub):
        stream = Large()
        for _ in range(4):
            hub.due(stream)
            hub.flush()
        assert len(stream.writes) == 1
        await asyncio.sleep(0.5)
        first, second = stream.writes
        assert second - first == pytest.approx(0.3)

    played(play)


def test_a_reader_that_stalls_holds_nobody_up():
    async def play(hub):
        slow, quick = Stream(takes=False), Stream()
        for stream in (slow, quick):
            hub.due(stream)
        hub.flush()
        assert len(quick.writes) == 1
        slow.takes = True
        await asyncio.sleep(3 * EVERY_S)
        assert len(slow.writes) == 1

    played(play)


def test_silent_streams_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(answer_stream, "LOOK_EVERY_S", 0.005)

    async def play(hub):
        streams = [Stream(), Stream()]
        for stream in streams:
            hub.add(stream)
        await asyncio.sleep(0.03)
        hub.discard(streams[1])
        seen = streams[1].looks
        await asyncio.sleep(0.03)
        assert streams[0].looks > seen >= 1
        assert streams[1].looks == seen

    played(play)


def test_a_stream_that_begins_is_written_before_others():
    """An answer begins in the flush that brings its news; others are written one turn later. Break
    it: `flush` without its first branch; or `_write_due` called there at once."""

    async def play(hub):
        old, new = Stream(), Stream()
        hub.due(old)
        hub.begins(new)
        hub.flush()
        assert (new.begins, len(old.writes)) == (1, 0)
        hub.begins(new)  # others that begin meanwhile do not hold it up again
        await asyncio.sleep(0)
        assert len(old.writes) == 1
        hub.flush()
        assert new.begins == 2
        hub.begins(new)
        hub.discard(new)
        hub.flush()
        assert new.begins == 2

    played(play)
