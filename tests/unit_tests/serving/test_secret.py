"""A coordinator with a secret: peers that have it get in, encrypted; others hear no word."""

import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_async.errors import ConfigurationError, CoordinatorLost
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.link import PROOF_BYTES, Link, connect_here
from megatron_async.serving.messages import MOST_BYTES, PROTOCOL, ClientHello, Welcome, encode
from megatron_async.serving.secret import encryption, read_secret
from tests.support.patience import PATIENCE_S, eventually
from tests.support.plain_peer import Peer, connected, running

SECRET = b"0123456789abcdef"


@pytest.fixture(params=["tcp://127.0.0.1:*", "ipc"])
def coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Coordinator]:
    address = request.param if request.param != "ipc" else f"ipc://{tmp_path}/c"
    with running(Coordinator(address, secret=SECRET)) as found:
        yield found


def test_who_has_it_gets_in(coordinator: Coordinator) -> None:
    with CoordinatorClient(coordinator.address, secret=SECRET) as client:
        assert client.stats()["clients"] == 1


@pytest.mark.parametrize("secret", [None, b"0123456789abcdeF"])
def test_who_does_not_have_it_is_kept_out(coordinator: Coordinator, secret: bytes | None) -> None:
    with pytest.raises(CoordinatorLost, match="--secret-file"):
        CoordinatorClient(coordinator.address, connect_timeout_s=0.5, secret=secret)
    assert coordinator.dispatcher.clients == {}


def is_kept_out(peer: Peer) -> bool:
    """Whether a coordinator hangs up on its hello, without a word."""
    try:
        peer.say(ClientHello(PROTOCOL))
        with pytest.raises(ConnectionError):
            peer.next()
    finally:
        peer.close()
    return True


def test_a_proof_cannot_be_said_again(coordinator: Coordinator) -> None:
    """Break it: leave the channel and the nonce out of `proof_of`."""
    before = Peer(coordinator.address, secret=SECRET)
    before.say(ClientHello(PROTOCOL))
    before.hear(Welcome)
    assert is_kept_out(Peer(coordinator.address, secret=SECRET, proof=lambda _: before.proof))
    before.close()


def test_the_coordinators_proof_is_none_of_a_peer(coordinator: Coordinator) -> None:
    """Break it: leave `person` and the nonce out of the proofs."""

    peer = Peer(coordinator.address, secret=SECRET, proof=lambda greeting: greeting.proof)
    assert is_kept_out(peer)


def test_who_is_between_the_two_learns_nothing(coordinator: Coordinator) -> None:
    """One that encrypts to both ends with keys of its own, and passes on what each of them says:
    the proofs are of two channels. Break it: `channel` is b"" at both ends."""
    heard: list[bytes] = []

    def sit_between(listener: socket.socket) -> None:
        end, _ = listener.accept()
        to_client = Link(end, MOST_BYTES, encryption(is_coordinator=True), is_server=True)
        while to_client.channel is None:
            select.select([to_client], [], [], PATIENCE_S)
            to_client.receive()
        to_service = Link(
            connected(coordinator.address), MOST_BYTES, encryption(is_coordinator=False)
        )
        links = {to_client.fileno(): (to_client, to_service)}
        links[to_service.fileno()] = (to_service, to_client)
        while not to_client.why_over and not to_service.why_over:
            for number in select.select(list(links), [], [], PATIENCE_S)[0]:
                source, target = links[number]
                for data in source.receive():
                    heard.append(data)
                    target.send(data)
        to_client.close()
        to_service.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=sit_between, args=(listener,))
        thread.start()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(CoordinatorLost):
            CoordinatorClient(address, connect_timeout_s=0.5, secret=SECRET)
        thread.join(PATIENCE_S)
    assert len(heard) == 1, "the coordinator's greeting alone"
    assert coordinator.dispatcher.clients == {}


def test_the_socket_of_the_host_wants_the_proof_too(coordinator: Coordinator) -> None:
    """All users of the host can list its name. Break it: `_hear` does not ask peers of the host."""
    greeter = Peer(coordinator.address, secret=SECRET)
    end = connect_here(greeter.greeting.here)
    assert end is not None
    here = Link(end, MOST_BYTES)
    here.send(b"x" * PROOF_BYTES)
    here.send(encode(ClientHello(PROTOCOL)))
    greeter.close()
    eventually(lambda: not here.receive() and here.why_over, "the coordinator to hang up")
    here.close()
    assert coordinator.dispatcher.clients == {}


def test_what_is_said_is_encrypted(coordinator: Coordinator) -> None:
    """Break it: `Link` writes what it is given."""
    peer = Peer(coordinator.address, secret=SECRET)
    seen: list[bytes] = []
    write = peer.link._write
    peer.link._write = lambda data: seen.append(bytes(data)) or write(data)  # type: ignore
    peer.say(ClientHello(PROTOCOL))
    peer.hear(Welcome)
    assert seen
    assert b"ClientHello" not in b"".join(seen)
    peer.close()


def test_a_coordinator_without_it_is_not_believed() -> None:
    coordinator = Coordinator("tcp://127.0.0.1:*")
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    with pytest.raises(CoordinatorLost):
        CoordinatorClient(coordinator.address, connect_timeout_s=0.5, secret=SECRET)
    coordinator.stop()
    thread.join(PATIENCE_S)


def test_the_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_secret(file)
    file.write_text("0123456789abcdef\n")
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"mode 644.*chmod 600"):
        read_secret(file)
    file.chmod(0o600)
    assert read_secret(file) == SECRET
    file.write_text("short")
    with pytest.raises(ConfigurationError, match="5 bytes"):
        read_secret(file)
