"""Readers are woken together, at most every few milliseconds, on whichever loop they wait."""

import asyncio

import numpy as np
import pytest

from megatron_async.requests import stream_wakeups as module
from megatron_async.requests.stream_wakeups import WOKEN_A_TURN, StreamWakeups
from tests.support.patience import TIME, Clock, VirtualLoop, run_virtually

EVERY_S = 0.2


@pytest.fixture(autouse=True)
def every(monkeypatch):
    monkeypatch.setattr(module, "WAKE_EVERY_S", EVERY_S)
    monkeypatch.setattr(module, "time", TIME)


def output(numbers, first=()):
    """The requests that a step served, and which of them got their first token."""
    ids = np.array(numbers, dtype=np.int64)
    return ids, np.isin(ids, list(first))


class Readers:
    """A coroutine for each of some requests that counts how often it is woken."""

    def __init__(self, wakeups, numbers):
        self.wakes = dict.fromkeys(numbers, 0)
        self.tasks = [asyncio.create_task(self._read(wakeups, number)) for number in numbers]

    async def _read(self, wakeups, number):
        while True:
            waiter = wakeups.waiter(number)
            try:
                await waiter
            except asyncio.CancelledError:
                wakeups.gave_up(number, waiter)
                raise
            self.wakes[number] += 1

    async def stop(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def turns(count=4):
    for _ in range(count):
        await asyncio.sleep(0)


def test_many_steps_are_one_wake_up_of_who_has_news():
    async def run():
        wakeups = StreamWakeups()
        readers = Readers(wakeups, range(5))
        await turns()
        wakeups.booked(*output([0, 1, 2]))  # the first after a rest does not wait
        await turns()
        assert list(readers.wakes.values()) == [1, 1, 1, 0, 0]
        start = Clock.now
        while Clock.now < start + EVERY_S / 2:
            wakeups.booked(*output([0, 1, 3]))
            await asyncio.sleep(0.001)
        assert list(readers.wakes.values()) == [1, 1, 1, 0, 0]
        await asyncio.sleep(EVERY_S)
        assert list(readers.wakes.values()) == [2, 2, 1, 1, 0]
        await asyncio.sleep(2 * EVERY_S)
        assert list(readers.wakes.values()) == [2, 2, 1, 1, 0], "without news nobody is woken"
        await readers.stop()
        assert not wakeups._waiting

    run_virtually(run())


def test_first_tokens_and_ends_do_not_wait():
    async def run():
        wakeups = StreamWakeups()
        wakeups._rests_until = Clock.now + 1e6
        readers = Readers(wakeups, range(4))
        await turns()
        wakeups.booked(*output([0, 1, 2], first=[1]))
        wakeups.wake(3)
        await turns()
        assert list(readers.wakes.values()) == [0, 1, 0, 1]
        await readers.stop()

    run_virtually(run())


def test_many_readers_leave_turns_to_others():
    """No more than a slice of 200 readers is woken between two turns of the engine."""

    async def run():
        wakeups, count = StreamWakeups(), 200
        readers = Readers(wakeups, range(count))
        await turns()
        wakeups.booked(*output(range(count)))
        seen = [0]
        while seen[-1] < count:
            await asyncio.sleep(0)
            seen.append(sum(readers.wakes.values()))
        assert max(np.diff(seen)) == WOKEN_A_TURN
        await readers.stop()

    run_virtually(run())


def test_nobody_waits_nothing_is_kept():
    wakeups = StreamWakeups()
    for _ in range(100):
        wakeups.booked(*output([0, 1]))
    assert not wakeups._booked


def test_steps_without_a_running_loop_keep_little():
    """Synchronous steps between two runs of the readers' loop."""
    wakeups, loop = StreamWakeups(), VirtualLoop()

    async def start():
        readers = Readers(wakeups, range(3))
        await turns()
        return readers

    readers = loop.run_until_complete(start())
    wakeups._rests_until = Clock.now + EVERY_S
    for _ in range(1000):
        wakeups.booked(*output([0, 2]))
    assert len(wakeups._booked) <= module.MOST_UNMERGED + 1
    loop.run_until_complete(asyncio.sleep(2 * EVERY_S))
    assert list(readers.wakes.values()) == [1, 0, 1]
    loop.run_until_complete(readers.stop())
    loop.close()


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_loop_that_no_longer_runs_holds_up_no_other(is_closed):
    wakeups, first = StreamWakeups(), VirtualLoop()

    async def start():
        return Readers(wakeups, [0])

    stale = first.run_until_complete(start())
    first.run_until_complete(turns())
    wakeups._rests_until = Clock.now + EVERY_S
    wakeups.booked(*output([0]))  # its timer is the first loop's
    if is_closed:
        first.run_until_complete(stale.stop())
        first.close()

    async def run():
        readers = Readers(wakeups, [1])
        await turns()
        wakeups.booked(*output([0, 1]))
        await asyncio.sleep(2 * EVERY_S)
        assert readers.wakes == {1: 1}
        await readers.stop()

    run_virtually(run())
    if not is_closed:
        first.run_until_complete(turns())
        assert stale.wakes == {0: 1}
        first.run_until_complete(stale.stop())
        first.close()


def test_a_cancelled_reader_is_forgotten_and_others_of_its_request_are_not():
    async def run():
        wakeups = StreamWakeups()
        readers = [Readers(wakeups, [7]) for _ in range(2)]
        await turns()
        await readers[0].stop()
        wakeups.booked(*output([7]))
        await turns()
        assert [mine.wakes for mine in readers] == [{7: 0}, {7: 1}]
        await readers[1].stop()
        assert not wakeups._waiting

    run_virtually(run())
