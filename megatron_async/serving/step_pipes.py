"""`StepPipes`: reads the sockets on which replicas of the coordinator's host write steps.

Nobody is woken by a write: while replicas write, the coordinator's loop looks every `EVERY_S`.
Steps of the same requests that have come meanwhile are joined into one message.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Iterator

import numpy as np

from megatron_async.serving.host_listener import connect
from megatron_async.serving.messages import StepTokens
from megatron_async.serving.step_pipe import HEAD, MOST_RECORD_BYTES, ROW_BYTES

EVERY_S = 0.004
"""Seconds between two looks. API processes write such tokens at most every 5 ms
(`server/stream_hub.py`)."""
PATIENCE_S = 0.02
"""Seconds for which the loop looks on when a replica has said nothing; a replica writes only if its
last step was sent far less long ago (`token_emitter.EVERY_S`)."""
NO_ROW = bytes(4)
"""A token of no row."""
MOST_RECORDS = 256
"""Most records of a pipe that are read at once."""


class _Pipe:
    """One replica's."""

    def __init__(self, reader: socket.socket) -> None:
        self.reader = reader
        self.heard = 0
        """Messages of its connection since it was offered."""
        self.records: deque[bytes] = deque()


class StepPipes:
    """Open pipes by the replica's identity. Used by the coordinator's thread only."""

    def __init__(self) -> None:
        self._pipes: dict[bytes, _Pipe] = {}
        self._next = self._until = 0.0
        self._buffer = bytearray(MOST_RECORD_BYTES)

    def __len__(self) -> int:
        return len(self._pipes)

    def open(self, identity: bytes, name: str) -> None:
        """A replica offers a pipe; one of another host is not found.

        Args:
            identity: of the replica.
            name: of the pipe, as in `StepPipeAt`.
        """
        self.close(identity)
        if (reader := connect(name)) is not None:
            self._pipes[identity] = _Pipe(reader)

    def close(self, identity: bytes) -> None:
        """Read no more from a replica."""
        if (pipe := self._pipes.pop(identity, None)) is not None:
            pipe.reader.close()

    def close_all(self) -> None:
        """Read no more."""
        for identity in list(self._pipes):
            self.close(identity)

    def before_message(self, identity: bytes, now: float) -> Iterator[StepTokens]:
        """A message of the replica's connection has come: the steps that were written before it.

        Args:
            identity: of the replica, or of a peer without a pipe.
            now: seconds.
        """
        if (pipe := self._pipes.get(identity)) is None:
            return
        self._stay_awake(now)
        yield from self._read(identity, pipe)
        pipe.heard += 1

    def due(self, now: float) -> Iterator[tuple[bytes, StepTokens]]:
        """All steps that can be told, if it is time to look: identity of the replica, and steps.

        Args:
            now: seconds.
        """
        if not self._pipes or now < self._next:
            return
        self._next = now + EVERY_S
        for identity, pipe in list(self._pipes.items()):
            for steps in self._read(identity, pipe):
                self._stay_awake(now)
                yield identity, steps

    def wait_s(self, now: float, longest_s: float) -> float:
        """Seconds until the next look, at most `longest_s`: so long may the loop sleep.

        Args:
            now: seconds.
            longest_s: seconds.
        """
        if not self._pipes or now >= self._until:
            return longest_s
        return min(max(self._next - now, 0.0), longest_s)

    def _stay_awake(self, now: float) -> None:
        if now >= self._until:
            self._next = now + EVERY_S
        self._until = now + PATIENCE_S

    def _read(self, identity: bytes, pipe: _Pipe) -> Iterator[StepTokens]:
        """The steps that no message still on its way must come before."""
        view = memoryview(self._buffer)
        while len(pipe.records) < MOST_RECORDS:
            try:
                size = pipe.reader.recv_into(self._buffer)
            except BlockingIOError:
                break
            except OSError:
                size = 0
            if not size:  # the other end is closed
                self.close(identity)
                break
            pipe.records.append(bytes(view[:size]))
        ready: list[bytes] = []
        while pipe.records and _sent_before(pipe.records[0]) <= pipe.heard:
            ready.append(pipe.records.popleft())
        yield from _joined(ready)


def _sent_before(record: bytes) -> int:
    """Messages that the replica had sent on its connection; 0 if no number is there."""
    return int(HEAD.unpack_from(record)[0]) if len(record) >= HEAD.size else 0


def _numbers(record: bytes) -> bytes:
    rows = (len(record) - HEAD.size) // ROW_BYTES
    return record[HEAD.size : HEAD.size + 8 * rows]


def _joined(records: list[bytes]) -> Iterator[StepTokens]:
    """A message for each run of steps of the same requests, a row a request: whoever reads it pays
    for each row. A broken record gives a message whose arrays do not fit together."""
    for numbers, group in itertools.groupby(records, _numbers):
        first = HEAD.size + len(numbers)
        tokens = [record[first:] for record in group]
        rows = len(numbers) // 8
        if not rows or any(len(each) != 4 * rows for each in tokens):
            yield StepTokens(numbers, b"", NO_ROW)
            return
        table = np.frombuffer(b"".join(tokens), np.int32).reshape(len(tokens), rows)
        counts = np.full(rows, len(tokens), np.int32)
        yield StepTokens(numbers, counts.tobytes(), table.T.tobytes())
