"""`HostSocket`: one end of a Unix socket that takes messages between a coordinator and a peer of
its host, beside their ZMQ connection.

ZMQ hands each message to a thread of its own, on both sides: three processes' threads are woken on
its way, which took 140 to 150 us where a Unix socket takes 13 to 40 (docs/records/server.md).
ZMQ stays for what it does well: finding each other, other hosts, lost peers, and messages that do
not fit here. To keep all messages in order, a record says how many messages its sender had sent by
ZMQ before, and waits until they are heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable

from megatron_async.serving.host_listener import HostListener

logger = logging.getLogger("megatron_async")

HEAD = struct.Struct("<q")
"""Head of a record; the message is behind it. A record without a message is a greeting."""
MOST_BYTES = 64 << 10
"""A longer message goes by ZMQ."""
MOST_AT_ONCE = 64
"""Most records that are read before others have their turn."""


class HostSocket:
    """One end; it is open when `attach` has given it a socket.

    Attributes:
        sent_otherwise: messages sent by ZMQ, behind the one by which this end begins to count.
        heard_otherwise: messages heard by ZMQ, behind the one by which the other end begins to
            count; -1: that one is not heard yet, so all records wait.
        may_write: whether the other end is sure to read.
    """

    def __init__(self) -> None:
        self.sent_otherwise = self.heard_otherwise = -1
        self.may_write = False
        self._end: socket.socket | None = None
        self._held: deque[bytes] = deque()
        """Records whose turn has not come."""

    def attach(self, end: socket.socket) -> None:
        """Use a connected socket that does not block."""
        self._end = end

    @property
    def is_over(self) -> bool:
        """Whether it is closed and nothing waits for its turn."""
        return self._end is None and not self._held

    def fileno(self) -> int:
        """The number of its socket; -1: there is none."""
        return -1 if self._end is None else self._end.fileno()

    def greet(self) -> None:
        """Tell the other end that this one reads."""
        self.may_write = True
        self.send(b"")

    def send(self, data: bytes) -> bool:
        """Write a message; never waits.

        Returns:
            whether it was written; if not, nothing was, and it must go by ZMQ.
        """
        if not self.may_write or self._end is None or len(data) > MOST_BYTES:
            return False
        try:
            self._end.send(HEAD.pack(self.sent_otherwise) + data)
        except BlockingIOError:  # full: the other end has not read for long
            return False
        except OSError:  # the other end is closed; what it wrote before can still be read
            self.may_write = False
            return False
        return True

    def receive(self, most: int | None = None) -> list[bytes]:
        """The messages whose turn has come, in order.

        Args:
            most: so many records are read at most; None: all that there are.
        """
        read = 0
        while self._end is not None and read != most:
            try:
                record = self._end.recv(HEAD.size + MOST_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:  # said once, before what can still be read
                continue
            except OSError:
                record = b""
            if not record:
                self.close()
                break
            read += 1
            self._held.append(record)
        ready: list[bytes] = []
        while self._held and _sent_before(self._held[0]) <= self.heard_otherwise:
            data = self._held.popleft()[HEAD.size :]
            if data:
                ready.append(data)
            else:
                self.may_write = self._end is not None
        return ready

    def close(self) -> None:
        """Write and read no more; what was written is still read at the other end."""
        self.may_write = False
        if self._end is not None:
            self._end.close()
            self._end = None


class OfferedSocket(HostSocket):
    """The end of a client or replica: listens until the coordinator connects. Made and used on one
    running event loop.

    Args:
        hear: called with messages that have come; not called for those that the caller of
            `receive` gets.

    Attributes:
        name: by which the coordinator finds it.

    Raises:
        OSError, AttributeError: this system has no such sockets.
    """

    def __init__(self, hear: Callable[[list[bytes]], None]) -> None:
        super().__init__()
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._listener = HostListener(self._take)
        self.name = self._listener.name

    @classmethod
    def offer(cls, hear: Callable[[list[bytes]], None]) -> OfferedSocket | None:
        """An end, or None where the system has none."""
        try:
            return cls(hear)
        except (OSError, AttributeError) as error:  # not Linux: no such kind of socket
            logger.debug("All messages go by ZMQ: %s", error)
            return None

    def close(self) -> None:
        """Write and read no more, and do not wait for the coordinator any more."""
        self._listener.close()
        if self.fileno() >= 0:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self.fileno())
        super().close()

    def _take(self, end: socket.socket) -> None:
        self.attach(end)
        self._loop.add_reader(end.fileno(), self._read)
        self.greet()

    def _read(self) -> None:
        # The first one is heard before the kernel is asked for more: mostly there are none, and an
        # exception for that takes as long as many a message.
        if first := self.receive(1):
            self._hear(first)
        if more := self.receive(MOST_AT_ONCE):
            self._hear(more)


def _sent_before(record: bytes) -> int:
    """Messages that the sender had sent by ZMQ before; 0 if no number is there."""
    return int(HEAD.unpack_from(record)[0]) if len(record) >= HEAD.size else 0
