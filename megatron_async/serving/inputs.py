"""`Inputs`: a coordinator waits for its ZMQ sockets and for those of peers of its host.

ZMQ's own poll asks each of its sockets twice, and takes ten system calls for a wait. Most messages
do not come by ZMQ: they need one, and ZMQ is asked only when one of its file descriptors says so.
Such a descriptor tells of changes only, and what is sent may take its signal (ZMQ's manual,
`ZMQ_FD`): so ZMQ is asked, too, after anything was sent or heard, and once in a while in any case.
"""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Any

import zmq

LOOK_EVERY_S = 0.05
"""Seconds after which ZMQ is asked in any case."""


class Inputs:
    """What a coordinator waits for. Used by one thread only.

    Args:
        watched: sockets of ZMQ.

    Attributes:
        epoll: watches them; other sockets may be added. None: this system has none, and ZMQ's poll
            waits.
    """

    def __init__(self, watched: Sequence[zmq.Socket[Any]]) -> None:
        self._watched = watched
        self._is_due = True
        self._looked = 0.0
        self._numbers: set[int] = set()
        self._poller = zmq.Poller()
        self.epoll: select.epoll | None = None
        if hasattr(select, "epoll"):
            self.epoll = select.epoll()
            self._numbers = {int(each.get(zmq.FD)) for each in watched}
            for number in self._numbers:
                self.epoll.register(number, select.EPOLLIN)
        else:
            for each in watched:
                self._poller.register(each, zmq.POLLIN)

    def wait(self, wait_s: float) -> list[int]:
        """Wait until something may have come; returns the numbers of other sockets that have
        something.

        Args:
            wait_s: seconds, at most.
        """
        if self.epoll is None:
            self._poller.poll(0 if self._is_due else math.ceil(1000 * wait_s))
            self._is_due = True
            return []
        found = [number for number, _ in self.epoll.poll(0 if self._is_due else wait_s)]
        ready = [number for number in found if number not in self._numbers]
        self._is_due |= len(ready) < len(found)
        return ready

    def look_again(self) -> None:
        """ZMQ was used: it may have taken the signal of what has come."""
        self._is_due = True

    def is_due(self, now: float) -> bool:
        """Whether ZMQ must be asked now: all of it, until it has nothing.

        Args:
            now: seconds.
        """
        if not self._is_due and now - self._looked < LOOK_EVERY_S:
            return False
        self._looked = now
        self._is_due = any(map(self.is_readable, self._watched))
        return self._is_due

    def is_readable(self, socket: zmq.Socket[Any]) -> bool:
        """Whether a socket of ZMQ has something."""
        return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        """Watch nothing any more; the sockets stay open."""
        if self.epoll is not None:
            self.epoll.close()
