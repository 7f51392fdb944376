"""`arrival`: wait for the device on an event loop while other coroutines run.

A thread that waits would be simpler. But the hand-over to it and back costs 70 microseconds of CPU.
And where the loop serves hundreds of readers, the thread gets the interpreter's lock milliseconds
after the event. So a CPU device calls the loop when an event is reached. A GPU's event is queried
in every turn of the loop (a turn costs 4 microseconds, a query one).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from functools import partial
from typing import Any

from megatron_async.devices import Event

ASK_FOR_S = 0.002
"""Seconds for which an event is queried. A longer wait uses a thread: its cost matters less then,
and queries keep a core busy."""
TOLD_WITHIN_S = 0.05
"""Seconds within which a device that calls the loop may do so. Then a thread waits, and its
caller also looks whether other ranks are lost."""


async def arrival(event: Event, wait: Callable[[Event], Coroutine[Any, Any, None]]) -> None:
    """Wait for `event` while other coroutines run.

    Args:
        event: recorded.
        wait: does the same with a thread, and handles an event that failed: for long waits.

    Raises:
        Exception: what `wait` raises.
    """
    if (answer := ask(event)) is Answer.REACHED:
        return
    loop = asyncio.get_running_loop()
    told = loop.create_future()
    if answer is Answer.FAILED:
        pass  # asking again would keep a core busy for the same answer
    elif event.tell(partial(_pass_on, loop, told)):
        patience = loop.call_later(TOLD_WITHIN_S, _set, told)
        try:
            await told
        finally:
            patience.cancel()
        answer = ask(event)
    else:
        deadline = time.perf_counter() + ASK_FOR_S
        while answer is Answer.NOT_YET and time.perf_counter() < deadline:
            await asyncio.sleep(0)
            answer = ask(event)
    if answer is not Answer.REACHED:
        await wait(event)


class Answer(Enum):
    """The answer of an event to a query."""

    NOT_YET = auto()
    REACHED = auto()
    FAILED = auto()
    """`wait` says why, because it knows what to do about it: other ranks may have died."""


def ask(event: Event) -> Answer:
    """Whether `event` is reached; never raises."""
    try:
        if not event.query():
            return Answer.NOT_YET
        event.wait()
    except Exception:
        return Answer.FAILED
    return Answer.REACHED


def _pass_on(loop: asyncio.AbstractEventLoop, told: asyncio.Future[None]) -> None:
    """On the device's thread."""
    try:
        loop.call_soon_threadsafe(_set, told)
    except RuntimeError:
        if not loop.is_closed():  # else nobody waits there any more
            raise


def _set(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)
