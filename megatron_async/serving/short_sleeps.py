"""`ShortSleeps`: a thread that waits for messages does not sleep for long while requests are on
their way.

A core that has slept for some milliseconds wakes late: a message between two processes of a GPU
host took 60 to 220 us where it came every 4 to 20 ms, and 30 to 50 us where its reader had been
woken every 0.25 ms, for 4 % of a core (docs/records/server.md, 2026-11-26). A request's first token
waits for five such wake-ups. To poll without sleeping, as SGLang's processes do, is a little
faster still and takes a whole core each.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import struct
import time
from collections.abc import Callable

logger = logging.getLogger("megatron_async")

INTERVAL_S = 0.00025
"""Seconds of the longest sleep."""
PATIENCE_S = 1.0
"""Seconds without a request after which sleeps are long again."""
LEAST_CORES = 8
"""Of this process: with fewer, wake-ups disturb the engine's thread more than they help."""
LOOK_EVERY_S = 0.1
"""Seconds between two looks whether there are requests."""

TFD_CLOEXEC, TFD_NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK


def are_worth_it() -> bool:
    """Whether this host has cores to spare for them."""
    return len(os.sched_getaffinity(0)) >= LEAST_CORES


class ShortSleeps:
    """A timer of Linux for a set of file descriptors that a thread polls. Used by one thread.

    Args:
        has_work: whether requests are on their way.

    Raises:
        OSError, AttributeError: this system has no such timers.
    """

    def __init__(self, has_work: Callable[[], bool]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._number = self._libc.timerfd_create(time.CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)
        if self._number < 0:
            raise OSError(ctypes.get_errno(), "no timer can be made")
        self._has_work = has_work
        self._runs = False
        self._worked = self._looked = 0.0

    @classmethod
    def where_worth_it(cls, has_work: Callable[[], bool]) -> ShortSleeps | None:
        """Such a timer, or None where the system has none or the host has few cores."""
        try:
            return cls(has_work) if are_worth_it() else None
        except (OSError, AttributeError) as error:  # not Linux
            logger.debug("Threads sleep until they are woken: %s", error)
            return None

    def fileno(self) -> int:
        """The file descriptor: readable when the timer has ticked."""
        return self._number

    def begin(self) -> None:
        """A request is on its way."""
        if not self._runs:
            self._worked = time.monotonic()
            self._set(INTERVAL_S)

    def tick(self) -> None:
        """The number is readable: the timer has ticked. It stops when there was no request for
        `PATIENCE_S`."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._number, 8)
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        if self._has_work():
            self._worked = now
        elif now - self._worked > PATIENCE_S:
            self._set(0.0)

    def close(self) -> None:
        """Tick no more. Whoever polls the number has ceased to before."""
        if self._number >= 0:
            os.close(self._number)
            self._number, self._runs = -1, True  # `begin` does nothing any more

    def _set(self, interval_s: float) -> None:
        """Tick in every interval; 0: never."""
        times = struct.pack("@4l", 0, round(1e9 * interval_s), 0, round(1e9 * interval_s))
        if self._libc.timerfd_settime(self._number, 0, times, None) < 0:
            raise OSError(ctypes.get_errno(), "the timer cannot be set")
        self._runs = interval_s > 0
