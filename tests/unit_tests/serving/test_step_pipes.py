"""Steps that a replica writes to a coordinator of its host: their order among its messages, and
what happens if the other end is not there, does not read, or writes nonsense."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_async.serving.host_listener import address_of
from megatron_async.serving.messages import StepPipeAt, StepTokens
from megatron_async.serving.step_arrays import StepArrays
from megatron_async.serving.step_pipe import HEAD, MOST_ROWS, StepPipe
from megatron_async.serving.step_pipes import EVERY_S, PATIENCE_S, StepPipes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux'")
Scene = Callable[["Line"], Coroutine[Any, Any, None]]
ME = b"replica"


class Line:
    """Both ends of a pipe, and the connection beside it."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.num_sent = 0
        self.pipe = StepPipe(self)  # type: ignore[arg-type]
        self.pipes = StepPipes()

    def send(self, message: Any) -> None:
        self.told.append(message)
        self.num_sent += 1

    async def connect(self) -> None:
        (offer,) = self.told
        assert isinstance(offer, StepPipeAt)
        self.pipes.open(ME, offer.name)
        await asyncio.sleep(0.01)

    def put(self, token: int, rows: int = 3) -> bool:
        return self.pipe.put(np.arange(rows), np.full(rows, token, np.int32))

    def due(self, now: float) -> list[list[int]]:
        """The tokens of request 1, by message."""
        return [self._of_one(steps) for _, steps in self.pipes.due(now)]

    def before(self, now: float) -> list[list[int]]:
        return [self._of_one(steps) for steps in self.pipes.before_message(ME, now)]

    @staticmethod
    def _of_one(steps: StepTokens) -> list[int]:
        arrays = StepArrays.of(steps)
        return arrays.tokens[np.repeat(arrays.numbers, arrays.counts) == 1].tolist()


def play(scene: Scene, connects: bool = True) -> None:
    async def main() -> None:
        line = Line()
        if connects:
            await line.connect()
        try:
            await scene(line)
        finally:
            line.pipe.close()
            line.pipes.close_all()

    asyncio.run(main())


def test_steps_of_the_same_requests_are_joined() -> None:
    async def scene(line: Line) -> None:
        assert [line.put(5), line.put(6), line.put(7, rows=2)] == [True] * 3
        assert line.due(1.0) == [[5, 6], [7]]
        assert line.put(8)
        assert line.due(1.0 + EVERY_S / 2) == [], "it is not time yet"
        assert line.due(1.0 + 1.1 * EVERY_S) == [[8]]

    play(scene)


def test_steps_and_messages_keep_their_order() -> None:
    """A step waits for the messages before it, and a message for the steps before it.

    Break it: `_read` takes all records; or `before_message` reads nothing.
    """

    async def scene(line: Line) -> None:
        line.put(1)
        line.send("a message")
        line.put(2)
        assert line.before(1.0) == [[1]]  # and now the message
        assert line.due(2.0) == [[2]]
        line.send("a slow one")
        line.put(3)
        assert line.due(3.0) == [], "the message is still on its way"
        assert line.before(3.1) == []
        assert line.due(4.0) == [[3]]

    play(scene)


def test_the_loop_sleeps_when_nothing_comes() -> None:
    """Break it: `wait_s` returns the longest; or `_stay_awake` does nothing."""

    async def scene(line: Line) -> None:
        assert line.pipes.wait_s(1.0, 0.05) == 0.05
        line.before(1.0)
        assert line.pipes.wait_s(1.0, 0.05) == pytest.approx(EVERY_S)
        line.put(1)
        assert line.due(1.0 + EVERY_S) == [[1]]
        assert line.pipes.wait_s(1.0 + EVERY_S, 0.05) == pytest.approx(EVERY_S)
        assert line.pipes.wait_s(1.1 + EVERY_S + PATIENCE_S, 0.05) == 0.05

    play(scene)


def test_without_a_reader_nothing_is_written() -> None:
    """Not before the coordinator connects, not when it is gone, and not into a full socket."""

    async def scene(line: Line) -> None:
        assert not line.pipe.is_open
        assert not line.put(1)
        await line.connect()
        assert line.put(1)
        assert not line.put(2, rows=MOST_ROWS + 1)
        written = 1
        while line.put(written + 1):
            written += 1
            assert written < 10_000, "nobody reads, and the socket is never full"
        got = [token for _ in range(100) for each in line.due(float(_)) for token in each]
        assert got == list(range(1, written + 1)), "what did not fit was not written in part"
        assert line.put(0), "there is room again"
        line.pipes.close_all()
        assert not line.put(1)
        assert not line.pipe.is_open

    play(scene, connects=False)


def test_what_was_written_before_the_end_is_read() -> None:
    async def scene(line: Line) -> None:
        line.put(1)
        line.pipe.close()
        assert line.due(1.0) == [[1]]
        assert line.due(2.0) == []
        assert not len(line.pipes)

    play(scene)


def test_other_users_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break it: `HostListener._accept` does not ask who it is."""

    async def scene(line: Line) -> None:
        with monkeypatch.context() as other:
            other.setattr(
                "megatron_async.serving.host_listener.CREDENTIALS",
                SimpleNamespace(size=12, unpack=lambda _: (1, 4321, 1)),
            )
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(address_of(line.told[0].name))
            await asyncio.sleep(0.01)
            assert not line.pipe.is_open
            assert stranger.recv(10) == b""
            stranger.close()
        await line.connect()
        assert line.put(1)
        assert line.due(1.0) == [[1]]

    play(scene, connects=False)


@pytest.mark.parametrize("record", [b"x", HEAD.pack(0) + b"12345", HEAD.pack(0) + bytes(13)])
def test_a_broken_record_is_a_broken_message(record: bytes) -> None:
    """The dispatcher then counts the replica as lost."""

    async def scene(line: Line) -> None:
        assert line.pipe._socket is not None
        line.pipe._socket.send(record)
        with pytest.raises(ValueError):
            line.due(1.0)

    play(scene)


def test_a_name_that_is_none_opens_nothing() -> None:
    pipes = StepPipes()
    for name in ("nobody", "x" * 200, "a\0b"):
        pipes.open(ME, name)
    assert not len(pipes)
