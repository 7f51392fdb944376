"""`StepPipe`: a replica's Unix socket to a coordinator of its host, for steps that may wait.

Waking other threads is most of the cost of a message. No thread waits for this socket: the
coordinator reads it every few milliseconds (`step_pipes.py`), so a write wakes nobody. A record
says how many messages the replica had sent on its connection, so the coordinator keeps the order.
Whatever does not fit into the socket goes by the connection.
"""

from __future__ import annotations

import logging
import socket
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.serving.connection import Connection
from megatron_async.serving.host_listener import HostListener
from megatron_async.serving.messages import StepPipeAt

logger = logging.getLogger("megatron_async")

HEAD = struct.Struct("<q")
"""Head of a record. Behind it: int64 `[rows]`, the requests; int32 `[rows]`, a token of each."""
ROW_BYTES = 12
MOST_ROWS = 1 << 14
"""Most rows of a record."""
MOST_RECORD_BYTES = HEAD.size + ROW_BYTES * MOST_ROWS


class StepPipe:
    """The writing end. Made and used on one running event loop.

    Args:
        connection: to the coordinator, which is told of the socket; it connects if it finds it.

    Raises:
        OSError, AttributeError: this system has no such sockets.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._socket: socket.socket | None = None
        self._listener = HostListener(self._take)
        connection.send(StepPipeAt(self._listener.name))
        self._sent_before = connection.num_sent

    @classmethod
    def offer(cls, connection: Connection[Any]) -> StepPipe | None:
        """A pipe, or None where the system has none."""
        try:
            return cls(connection)
        except (OSError, AttributeError) as error:  # not Linux: no such kind of socket
            logger.debug("Steps go by the connection only: %s", error)
            return None

    @property
    def is_open(self) -> bool:
        """Whether the coordinator has connected."""
        return self._socket is not None

    def put(self, numbers: NDArray[np.int64], tokens: NDArray[np.integer[Any]]) -> bool:
        """Write a step; never waits, and wakes nobody.

        Args:
            numbers: int64 `[rows]`: the requests.
            tokens: int32 `[rows]`: one of each.

        Returns:
            whether it was written; if not, nothing was.
        """
        if self._socket is None or len(numbers) > MOST_ROWS:
            return False
        head = HEAD.pack(self._connection.num_sent - self._sent_before)
        try:
            self._socket.send(b"".join((head, numbers, tokens)))
        except BlockingIOError:  # full: the coordinator has not read for long
            return False
        except OSError:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Write no more. What was written is still read."""
        self._listener.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _take(self, accepted: socket.socket) -> None:
        self._socket = accepted
