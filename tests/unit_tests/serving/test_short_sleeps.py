"""`ShortSleeps`: ticks while requests are on their way, and not much longer."""

from __future__ import annotations

import asyncio
import os
import select
import time

import pytest

from megatron_async.serving import short_sleeps
from megatron_async.serving.short_sleeps import INTERVAL_S, ShortSleeps

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="timers of Linux")


def ticks(sleeps: ShortSleeps, seconds: float) -> int:
    """How often a loop is woken."""

    async def run() -> int:
        loop, count = asyncio.get_running_loop(), 0

        def tick() -> None:
            nonlocal count
            count += 1
            sleeps.tick()

        loop.add_reader(sleeps, tick)
        await asyncio.sleep(seconds)
        loop.remove_reader(sleeps)
        return count

    return asyncio.run(run())


def test_it_ticks_from_the_first_request_on() -> None:
    sleeps = ShortSleeps(lambda: True)
    assert ticks(sleeps, 0.05) == 0
    sleeps.begin()
    # A busy machine may be late, and ticks that were missed come as one.
    assert 5 < ticks(sleeps, 0.1) <= 0.1 / INTERVAL_S + 5
    sleeps.close()


def test_it_stops_when_there_was_no_request_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on with the next one. Break it: never stop; stop at the first look."""
    monkeypatch.setattr(short_sleeps, "PATIENCE_S", 0.1)
    monkeypatch.setattr(short_sleeps, "LOOK_EVERY_S", 0.01)
    has_work = True
    sleeps = ShortSleeps(lambda: has_work)
    sleeps.begin()
    ticks(sleeps, 0.15)
    assert ticks(sleeps, 0.05) > 5, "there are requests"
    has_work = False
    assert ticks(sleeps, 0.05) > 5, "patience has not ended"
    ticks(sleeps, 0.15)
    assert ticks(sleeps, 0.05) == 0
    sleeps.begin()
    assert ticks(sleeps, 0.05) > 5
    sleeps.close()


def test_it_is_for_hosts_with_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    assert ShortSleeps.where_worth_it(lambda: True) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    sleeps = ShortSleeps.where_worth_it(lambda: True)
    assert sleeps is not None
    sleeps.close()
    sleeps.begin()  # closed: does nothing


def test_a_system_without_such_timers_sleeps_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_sleeps, "are_worth_it", lambda: True)
    monkeypatch.setattr(short_sleeps.ctypes, "CDLL", lambda *_, **__: object())
    assert ShortSleeps.where_worth_it(lambda: True) is None


def test_a_turn_costs_little() -> None:
    """Of a core: a tick reads one number, and looks for requests ten times a second."""
    looked = 0

    def has_work() -> bool:
        nonlocal looked
        looked += 1
        return True

    sleeps = ShortSleeps(has_work)
    sleeps.begin()
    start = time.monotonic()
    ticks(sleeps, 0.3)
    assert looked <= (time.monotonic() - start) / short_sleeps.LOOK_EVERY_S + 1
    sleeps.close()
