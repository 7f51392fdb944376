"""A link keeps messages whole and in order, however its socket divides them, and takes no more
memory than it says; a coordinator's strangers are few, and have little time."""

import contextlib
import errno
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.serving import coordinator as coordinator_module
from megatron_async.serving import link as link_module
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.link import HEAD, Greeting, Link, connect_here
from megatron_async.serving.messages import PROTOCOL, ClientHello, Refused, Welcome, encode
from megatron_async.serving.records import CoordinatorConfig
from megatron_async.serving.secret import encryption
from tests.support.patience import PATIENCE_S, eventually
from tests.support.plain_peer import Peer, connected, running

MOST = 1000


def pair(is_encrypted: bool = False) -> tuple[Link, Link]:
    one, other = socket.socketpair()
    tls = [encryption(is_coordinator) if is_encrypted else None for is_coordinator in (True, False)]
    links = Link(one, 1 << 24, tls[0], is_server=True), Link(other, 1 << 24, tls[1])
    while None in (links[0].channel, links[1].channel):
        assert not links[0].receive() + links[1].receive()
    return links


@given(messages=st.lists(st.binary(max_size=70)), cuts=st.lists(st.integers(1, 40)))
def test_messages_stay_whole_however_they_are_divided(messages: list[bytes], cuts: list[int]):
    """Break it: `_whole` drops the beginning of the next message."""
    one, other = socket.socketpair()
    link, found = Link(other, MOST), []
    data = b"".join(HEAD.pack(len(each)) + each for each in messages)
    while data:
        cut = cuts.pop() if cuts else len(data)
        one.sendall(data[:cut])
        data = data[cut:]
        found += link.receive()
    one.close()
    assert found == messages
    assert link.receive() == []
    assert link.is_cut
    link.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_a_socket_does_not_take_waits(is_encrypted: bool) -> None:
    """Break it: `_put` writes although something waits."""
    one, other = pair(is_encrypted)
    asked: list[bool] = []
    one.watch = asked.append
    messages = [bytes([number]) * 30_000 * number for number in range(1, 12)]
    found: list[bytes] = []
    for message in messages:
        one.send(message)
        found += other.receive()  # now there is room for the next one, before what waits
    assert one.unsent
    assert one.unsent_bytes == sum(map(len, one.unsent))
    while len(found) < len(messages):
        one.flush()
        found += other.receive()
    one.flush()
    assert found == messages
    assert (one.unsent_bytes, asked[0], asked[-1]) == (0, True, False)
    for each in (one, other):
        each.close()


@pytest.mark.parametrize("size", [MOST + 1, 2**31, 2**32 - 1])
def test_a_length_that_is_too_large_ends_the_link_before_its_bytes_come(size: int) -> None:
    one, other = socket.socketpair()
    link = Link(other, MOST)
    one.sendall(HEAD.pack(2) + b"ok" + HEAD.pack(size))
    assert link.receive() == [b"ok"]
    assert str(size) in link.why_over
    assert not link.is_cut
    one.close()
    link.close()


def test_what_is_written_before_an_end_is_read() -> None:
    """Break it: `receive` ends the link when a send has failed."""
    one, other = pair()
    one.send(b"last words")
    other.send(b"nobody reads this")
    one.close()
    other.send(b"nor this")
    assert other.receive() == [b"last words"]
    assert other.receive() == []
    assert other.is_cut
    assert not other.unsent
    other.close()


def test_encryption_without_a_channel_binding_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a proof would hold for every connection, and could be passed on."""
    one, other = pair(is_encrypted=True)
    assert one.channel == other.channel != pair(is_encrypted=True)[0].channel
    monkeypatch.setattr(ssl.SSLObject, "get_channel_binding", lambda *_: None)
    ends = socket.socketpair()
    one = Link(ends[0], MOST, encryption(True), is_server=True)
    other = Link(ends[1], MOST, encryption(False))
    for _ in range(4):
        assert not one.receive() + other.receive()
    assert "channel binding" in one.why_over + other.why_over
    assert not one.channel
    assert not other.channel


def test_closing_waits_for_a_reader_a_little() -> None:
    one, other = pair()
    message = b"x" * (1 << 20)
    one.send(message)
    found: list[bytes] = []

    def read() -> None:
        while not other.why_over:
            found.extend(other.receive())

    thread = threading.Thread(target=read)
    thread.start()
    one.close(linger_s=PATIENCE_S)
    thread.join(PATIENCE_S)
    assert found == [message]
    other.close()


def test_another_users_process_is_no_friend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither end takes the other. Break it: `connect_here`, or the coordinator, does not ask."""
    with served() as service:
        peer = Peer(service.address)
        name = peer.greeting.here
        end = connect_here(name)
        assert end is not None
        end.close()
        for module in (link_module, coordinator_module):
            with monkeypatch.context() as other:
                other.setattr(module, "is_friend", lambda _: False)
                if (end := connect_here(name)) is not None:
                    end.settimeout(PATIENCE_S)
                    assert end.recv(100) == b""
                    end.close()
                else:
                    assert module is link_module
                with CoordinatorClient(service.address) as client:
                    assert client.stats()["clients"] == 1
        peer.close()


def served(address: str = "tcp://127.0.0.1:*") -> AbstractContextManager[Coordinator]:
    return running(Coordinator(address, CoordinatorConfig(ping_interval_s=0.05)))


def is_cut_off(end: socket.socket) -> bool:
    """Whether the coordinator hangs up; what it says before does not matter."""
    with contextlib.suppress(ConnectionError):
        while end.recv(1000):
            pass
    end.close()
    return True


SAID: dict[str, Callable[[Peer], bytes]] = {
    "nothing": lambda peer: b"",
    "half a length": lambda peer: b"\x10\x00",
    "half a proof": lambda peer: HEAD.pack(32) + peer.proof[:9],
    "garbage": lambda peer: b"GET / HTTP/1.1\r\n\r\n" * 100,
    "another proof": lambda peer: HEAD.pack(32) + bytes(32),
    "a large hello": lambda peer: HEAD.pack(1 << 20),
}


@pytest.mark.parametrize("said", SAID)
def test_strangers_have_little_time_and_memory(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers that say too little are cut off after a while, all others that are wrong at once.
    Break it: `_end_strangers` ends nobody; `STRANGER_BYTES` is `MOST_BYTES`."""
    is_late = said in ("nothing", "half a length", "half a proof")
    monkeypatch.setattr(coordinator_module, "STRANGER_S", 0.3 if is_late else 3600.0)
    with served() as service:
        end = connected(service.address)
        peer = Peer.__new__(Peer)  # only its proof: it is said by another socket
        peer.proof = bytes(32)
        end.sendall(SAID[said](peer))
        assert is_cut_off(end)
        with CoordinatorClient(service.address) as client:
            assert client.stats()["clients"] == 1
        eventually(lambda: not service._peers, "all to be forgotten")


def test_who_was_refused_must_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused peer is a stranger again, but for the time to read why."""
    monkeypatch.setattr(coordinator_module, "STRANGER_S", 0.3)
    with served() as service:
        peer = Peer(service.address)
        peer.say(ClientHello(PROTOCOL - 1))
        assert "install the same version" in peer.hear(Refused).reason
        assert peer.is_cut_off()


def test_thousands_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of strangers go; known peers stay. Break it: `_accept` counts nobody."""
    monkeypatch.setattr(coordinator_module, "MOST_STRANGERS", 20)
    with served() as service, CoordinatorClient(service.address) as client:
        ends = [connected(service.address) for _ in range(300)]
        most = []
        for _ in range(2000 - len(ends)):
            ends.append(connected(service.address))
            ends.pop(0).close()
            most.append(len(service._peers))
        assert client.stats()["clients"] == 1
        eventually(lambda: len(service._peers) <= 21, "the oldest to go")
        with CoordinatorClient(service.address) as other:
            assert other.stats()["clients"] == 2
        for end in ends:
            end.close()


def test_no_open_files_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator serves those that it has, ends strangers, and tries again later. Break it:
    `_accept` raises."""
    failures = [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED]

    class Full:
        """A listener of a process that has no files left."""

        def __init__(self, listener: socket.socket) -> None:
            self._listener = listener

        def accept(self) -> Any:
            if failures:
                raise OSError(failures.pop(0), "there are too many")
            return self._listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._listener, name)

    coordinator = Coordinator("tcp://127.0.0.1:*")
    coordinator._listener = Full(coordinator._listener)  # type: ignore[assignment]
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    with CoordinatorClient(coordinator.address) as client:
        assert client.stats()["clients"] == 1
    assert not failures
    coordinator.stop()
    thread.join(PATIENCE_S)


def test_a_greeting_is_read_with_care() -> None:
    greeting = Greeting(b"n" * 16, b"p" * 32, "name")
    assert Greeting.decode(greeting.encode()) == greeting
    for wrong in (b"", b"x" * 80, greeting.encode()[:60], greeting.encode() + b"x" * 64):
        with pytest.raises(ValueError, match="it begins with"):
            Greeting.decode(wrong)


def test_a_peer_can_stay_where_it_has_connected() -> None:
    """A peer of another host does so."""
    with served() as service:
        peer = Peer(service.address)
        peer.link.send(encode(ClientHello(PROTOCOL)))
        assert peer.hear(Welcome).silence_s == CoordinatorConfig().silence_s
        assert [each.is_here for each in service._peers.values()] == [False]
        peer.close()
