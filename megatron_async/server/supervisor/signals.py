"""Signals of the supervisor as events that its loop waits for."""

from __future__ import annotations

import selectors
import signal
import socket
from types import FrameType

LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Collects signals from now on; a context manager that puts the old handlers back.

    From the main thread alone. `leave` counts those of `LEAVE` that have come; `last` is the last
    of them."""

    def __init__(self) -> None:
        self.leave = 0
        self.last: int | None = None
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        self._before = {
            number: signal.signal(number, self._take) for number in (*LEAVE, signal.SIGCHLD)
        }
        # The kernel's part of a signal wakes `wait`, whatever Python does at that moment.
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def wait(self, seconds: float) -> None:
        """Sleep until a signal, a child's end among them, or for so long."""
        if self._selector.select(max(seconds, 0.0)):
            while True:
                try:
                    self._read.recv(512)
                except BlockingIOError:
                    return

    def _take(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.leave += 1
            self.last = number

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._selector.close()
        self._read.close()
        self._write.close()
