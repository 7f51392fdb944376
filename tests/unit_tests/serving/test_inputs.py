"""`Inputs`: nothing that comes by ZMQ is overlooked; its descriptor tells of changes only."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from megatron_async.serving import inputs
from megatron_async.serving.inputs import Inputs

Sockets = tuple["zmq.Socket[Any]", "zmq.Socket[Any]"]
LONG_S = 10.0


@pytest.fixture
def pair() -> Iterator[Sockets]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    ours.bind("inproc://inputs")
    theirs.connect("inproc://inputs")
    yield ours, theirs
    context.destroy(0)


def settled(watched: Inputs) -> None:
    """Hear all, as a coordinator does."""
    for _ in range(3):
        watched.wait(0)
        watched.is_due(time.monotonic())


def test_a_message_ends_the_wait_and_is_due(pair: Sockets) -> None:
    ours, theirs = pair
    watched = Inputs([ours])
    settled(watched)
    theirs.send(b"a")
    start = time.monotonic()
    assert watched.wait(LONG_S) == []
    assert time.monotonic() - start < LONG_S
    assert watched.is_due(time.monotonic())
    assert ours.recv_multipart()[1] == b"a"
    watched.close()


def test_what_a_send_has_taken_the_signal_of_is_heard_at_once(
    pair: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send reads ZMQ's commands, and the descriptor tells no more of what came with them.

    Break it: `look_again` that does nothing.
    """
    monkeypatch.setattr(inputs, "LOOK_EVERY_S", LONG_S)
    ours, theirs = pair
    theirs.send(b"a")
    watched = Inputs([ours])
    identity, _ = ours.recv_multipart()
    settled(watched)
    theirs.send(b"b")
    ours.get(zmq.EVENTS)  # as a send may
    watched.look_again()
    start = time.monotonic()
    watched.wait(LONG_S)
    assert time.monotonic() - start < LONG_S
    assert watched.is_due(time.monotonic())
    assert ours.recv_multipart() == [identity, b"b"]
    watched.close()


def test_zmq_is_asked_once_in_a_while_in_any_case(
    pair: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break it: `is_due` that looks at nothing but `_is_due`."""
    monkeypatch.setattr(inputs, "LOOK_EVERY_S", 0.01)
    ours, theirs = pair
    watched = Inputs([ours])
    settled(watched)
    theirs.send(b"a")
    ours.get(zmq.EVENTS)
    time.sleep(0.02)
    assert watched.is_due(time.monotonic())
    watched.close()


def test_another_socket_is_told_by_its_number_and_zmq_is_not_asked(pair: Sockets) -> None:
    watched = Inputs([pair[0]])
    if watched.epoll is None:
        pytest.skip("this system has no epoll")
    mine, other = socket.socketpair()
    watched.epoll.register(mine.fileno())
    settled(watched)
    other.send(b"a")
    watched.is_due(time.monotonic())
    assert watched.wait(LONG_S) == [mine.fileno()]
    assert not watched.is_due(time.monotonic())
    watched.close()
    mine.close()
    other.close()
