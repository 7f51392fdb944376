"""Unix sockets beside a ZMQ connection: messages keep their order whichever way they take, and
nothing is lost when a socket is full, closed, or was never there."""

from __future__ import annotations

import asyncio
import select
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.serving.host_listener import address_of
from megatron_async.serving.host_socket import HEAD, MOST_BYTES, HostSocket, OfferedSocket
from megatron_async.serving.host_sockets import HostSockets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux'")
ME, OTHER = b"peer", b"other"
Scene = Callable[["Line"], Coroutine[Any, Any, None]]


class Line:
    """A peer and a coordinator, their sockets and, as queues, ZMQ; text that begins with a capital
    goes by ZMQ."""

    def __init__(self) -> None:
        self.peer = OfferedSocket(self._hear)
        self.epoll = select.epoll()
        self.coordinator = HostSockets(self.epoll)
        self.up: deque[bytes] = deque([b"Offer"])
        self.peer.sent_otherwise += 1
        self.down: deque[bytes] = deque()
        self.at_coordinator: list[bytes] = []
        self.at_peer: list[bytes] = []

    def _hear(self, messages: list[bytes]) -> None:
        self.at_peer += messages

    # ---- As `Connection` does it ----

    def say_up(self, data: bytes) -> None:
        if data[:1].isupper() or not self.peer.send(data):
            self.peer.sent_otherwise += 1
            self.up.append(data)

    def hear_down(self) -> None:
        """One message of ZMQ, if there is one."""
        if not self.down:
            return
        self.at_peer += self.peer.receive()
        data = self.down.popleft()
        if data == b"Open":
            self.peer.heard_otherwise = 0
        else:
            self.peer.heard_otherwise += self.peer.heard_otherwise >= 0
            self.at_peer.append(data)
        self.at_peer += self.peer.receive()

    # ---- As `Coordinator` does it ----

    def say_down(self, data: bytes) -> None:
        if data[:1].isupper() or not self.coordinator.send(ME, data):
            self.coordinator.sent_otherwise(ME)
            self.down.append(data)

    def hear_up(self) -> None:
        """One message of ZMQ, if there is one."""
        if not self.up:
            return
        self.at_coordinator += self.coordinator.before_message(ME)
        data = self.up.popleft()
        if data == b"Offer":
            if self.coordinator.open(ME, self.peer.name):
                self.say_down(b"Open")
        else:
            self.at_coordinator.append(data)
        self.at_coordinator += self.coordinator.after_message(ME)

    def hear_here(self) -> None:
        ready = [number for number, _ in self.epoll.poll(0)]
        for identity, messages in chain.from_iterable(map(self.coordinator.read, ready)):
            assert identity == ME
            self.at_coordinator += messages

    async def all_heard(self) -> None:
        for _ in range(4):
            while self.up or self.down:
                self.hear_up()
                self.hear_down()
            self.hear_here()
            await asyncio.sleep(0.001)

    async def opened(self) -> None:
        await self.all_heard()
        assert self.peer.may_write
        assert self.coordinator.send(ME, b"a")
        await self.all_heard()
        self.at_peer.clear()


def play(scene: Scene) -> None:
    async def main() -> None:
        line = Line()
        try:
            await scene(line)
        finally:
            line.peer.close()
            line.coordinator.close_all()

    asyncio.run(main())


MOVES = ("up", "Up", "down", "Down", "hear_up", "hear_down", "hear_here", "turn")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(MOVES), max_size=60))
def test_every_message_comes_once_and_in_order(moves: list[str]) -> None:
    """Break it: `receive` gives records whose turn has not come, or the counts begin one later."""

    async def scene(line: Line) -> None:
        said_up, said_down = [], []
        for number, move in enumerate(moves):
            text = f"{move}{number}".encode()
            if move in ("up", "Up"):
                said_up.append(text)
                line.say_up(text)
            elif move in ("down", "Down"):
                said_down.append(text)
                line.say_down(text)
            elif move == "turn":
                await asyncio.sleep(0)
            else:
                getattr(line, move)()
        await line.all_heard()
        assert line.at_coordinator == said_up
        assert line.at_peer == said_down

    play(scene)


def test_both_ways_are_taken() -> None:
    async def scene(line: Line) -> None:
        await line.opened()
        line.say_up(b"x")
        line.say_down(b"y")
        assert not line.up
        assert not line.down
        await line.all_heard()
        assert (line.at_coordinator, line.at_peer) == ([b"x"], [b"y"])

    play(scene)


def test_a_full_socket_and_long_messages_go_by_zmq() -> None:
    async def scene(line: Line) -> None:
        await line.opened()
        said = [b"%d" % number + b"x" * 4000 for number in range(200)]
        said.insert(3, b"y" * (MOST_BYTES + 1))
        for data in said:
            line.say_up(data)
        assert len(line.up) > 1, "it never was full"
        await line.all_heard()
        assert line.at_coordinator == said
        line.say_up(b"z")
        assert not line.up, "it is not used again"

    play(scene)


@pytest.mark.parametrize("unread", [False, True], ids=["all read", "something unread"])
def test_the_last_words_of_a_closed_end_are_heard(unread: bool) -> None:
    """Break it: `receive` takes ConnectionResetError for the end. (The kernel says it first where
    the other end has left something unread.)"""

    async def scene(line: Line) -> None:
        await line.opened()
        if unread:
            assert line.coordinator.send(ME, b"unread")
        line.say_up(b"goodbye")
        line.peer.close()
        assert line.coordinator.close(ME) == [b"goodbye"]
        assert not len(line.coordinator)
        assert not line.coordinator.send(ME, b"x")

    play(scene)


def test_an_end_that_closes_is_let_go() -> None:
    async def scene(line: Line) -> None:
        await line.opened()
        line.peer.close()
        line.hear_here()
        assert not len(line.coordinator)
        line.say_down(b"x")
        assert list(line.down) == [b"x"]

    play(scene)


def test_nothing_is_said_before_the_other_end_reads() -> None:
    """Break it: the coordinator writes as soon as it has connected. A peer may yet send it away."""

    async def scene(line: Line) -> None:
        line.hear_up()
        assert not line.coordinator.send(ME, b"x")

    play(scene)


def test_other_users_are_sent_away_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = SimpleNamespace(size=12, unpack=lambda _: (1, 4321, 1))

    async def scene(line: Line) -> None:
        with monkeypatch.context() as other:
            other.setattr("megatron_async.serving.host_listener.CREDENTIALS", stranger)
            raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            raw.connect(address_of(line.peer.name))
            await asyncio.sleep(0.01)
            assert raw.recv(10) == b""
            raw.close()
            assert not line.coordinator.open(OTHER, line.peer.name)
            await asyncio.sleep(0.01)
        await line.opened()

    play(scene)


def test_a_name_that_is_none_opens_nothing() -> None:
    sockets = HostSockets(select.epoll())
    for name in ("nobody", "x" * 200, "a\0b"):
        assert not sockets.open(ME, name)
    assert not len(sockets)
    sockets.close_all()


def test_a_broken_record_is_a_broken_message() -> None:
    """Whoever decodes it then sends the peer away."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = HostSocket()
    end.heard_otherwise = 0
    ours.setblocking(False)
    end.attach(ours)
    theirs.send(b"abc")
    theirs.send(HEAD.pack(0) + b"d")
    assert end.receive() == [b"d"], "three bytes hold no message"
    end.close()
    theirs.close()
