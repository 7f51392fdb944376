"""A coordinator with a secret: who has it gets in, encrypted; nobody else says or hears a word."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from megatron_async.errors import ConfigurationError, CoordinatorLost
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.messages import PROTOCOL, ClientHello, encode
from megatron_async.serving.secret import read_secret, secure_peer
from tests.support.patience import PATIENCE_S

SECRET = b"0123456789abcdef"


@pytest.fixture(params=["tcp://127.0.0.1:*", "ipc"])
def coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Coordinator]:
    address = request.param if request.param != "ipc" else f"ipc://{tmp_path}/c"
    coordinator = Coordinator(address, secret=SECRET)
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    yield coordinator
    coordinator.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_who_has_it_gets_in(coordinator: Coordinator) -> None:
    with CoordinatorClient(coordinator.address, secret=SECRET) as client:
        assert client.stats()["clients"] == 1


@pytest.mark.parametrize("secret", [None, b"0123456789abcdeF"])
def test_who_does_not_have_it_is_kept_out(coordinator: Coordinator, secret: bytes | None) -> None:
    with pytest.raises(CoordinatorLost, match="--secret-file"):
        CoordinatorClient(coordinator.address, connect_timeout_s=0.5, secret=secret)
    assert coordinator.dispatcher.clients == {}


def test_the_coordinators_public_key_is_not_enough(coordinator: Coordinator) -> None:
    """It is no secret to who was let in once; what lets in is the key of peers. Let the doorkeeper
    say yes to everybody, and this fails."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        secure_peer(stranger, SECRET)
        public, own = zmq.curve_keypair()
        stranger.set(zmq.CURVE_PUBLICKEY, public)
        stranger.set(zmq.CURVE_SECRETKEY, own)
        stranger.connect(coordinator.address)
        stranger.send(encode(ClientHello(PROTOCOL)))
        assert not stranger.poll(500)
    assert coordinator.dispatcher.clients == {}


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
