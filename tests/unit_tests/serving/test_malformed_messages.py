"""Sockets on which something else is said than was agreed, or nobody reads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_async.errors import ConfigurationError, CoordinatorLost, RequestError
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving import coordinator as coordinator_module
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.link import HEAD, NONCE_BYTES, Greeting
from megatron_async.serving.messages import (
    PROTOCOL,
    Card,
    ClientHello,
    Generate,
    Refused,
    ReplicaHello,
    ReplicaInfo,
    Run,
    Welcome,
    decode_for_replica,
    encode,
)
from megatron_async.serving.model_card import ModelCard
from megatron_async.serving.records import CoordinatorConfig
from megatron_async.serving.secret import COORDINATOR, proof_of
from tests.support.patience import PATIENCE_S, eventually
from tests.support.plain_peer import Peer
from tests.unit_tests.serving.told_service import tokens_of

PARAMS = msgspec.Raw(msgspec.msgpack.encode({}))


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    coordinator = Coordinator("tcp://127.0.0.1:*", CoordinatorConfig(ping_interval_s=0.1))
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    yield coordinator
    coordinator.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def request(number: int, **changes: Any) -> bytes:
    values = {"params": PARAMS, "max_new_tokens": 1, "priority": 0}
    return encode(Generate(number=number, prompt=[1], **{**values, **changes}))


def replica(address: str) -> Peer:
    """One that has joined."""
    sizes = {"slots": 8, "kv_blocks": 8, "block_size_tokens": 4}
    info = ReplicaInfo(name="a", instance="a", model={}, **sizes)
    peer = Peer(address, decode_for_replica)
    peer.say(ReplicaHello(PROTOCOL, info))
    assert peer.hear(Welcome).wants_card
    card = ModelCard(model="a", max_sequence_length=64, vocab_size=64, block_size_tokens=4)
    peer.say(Card("a", card.encode()))
    return peer


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"\x82\xa4type\xa7Goodbye\xa7failure\xa2\xff\xfe",
        request(1, params=msgspec.Raw(b"\x91" * 100_000 + b"\x80")),
        request(1, priority=1.5),
    ],
    ids=["empty", "garbage", "no UTF-8", "nested", "float"],
)
def test_what_cannot_be_read_is_refused(coordinator: Coordinator, message: bytes) -> None:
    peer = Peer(coordinator.address)
    peer.say(ClientHello(PROTOCOL))
    peer.hear(Welcome)
    peer.say(request(0))
    peer.say(message)
    assert "cannot be read" in peer.hear(Refused).reason
    with CoordinatorClient(coordinator.address) as client:
        assert client.stats()["aborted_requests"] == 1
    peer.close()


@pytest.mark.parametrize(("limit", "most"), [("MOST_UNREAD", 20), ("MOST_UNREAD_BYTES", 4 << 20)])
def test_who_does_not_read_is_lost(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(coordinator_module, limit, most)
    peer, server = Peer(coordinator.address), replica(coordinator.address)
    peer.say(ClientHello(PROTOCOL))
    peer.hear(Welcome)
    peer.say(request(0))
    number = server.hear(Run).number
    chunk = encode(tokens_of({number: [7] * 50_000}))
    with CoordinatorClient(coordinator.address) as client:
        for _ in range(1300):
            server.say(chunk)
        eventually(lambda: not client.stats()["unfinished_requests"])
        assert client.stats()["clients"] == 1
    peer.close()
    server.close()


def test_a_request_that_cannot_be_sent(coordinator: Coordinator) -> None:
    with CoordinatorClient(coordinator.address) as client:
        for prompt, priority in (([2**64], 0), ([True], 0), ("\ud800", 0), ([1], 1.5)):
            with pytest.raises(RequestError):
                next(client.stream(prompt, SamplingParams(), priority))  # type: ignore[arg-type]
        assert client.stats()["received_requests"] == 0


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-OpenSSH_9.6\r\n", HEAD.pack(60) + b"\0" * 60, None],
    ids=["another protocol", "no greeting", "no message"],
)
def test_something_else_answers(answer: bytes | None) -> None:
    """It is said at once: to wait would not help."""

    def serve(listener: socket.socket) -> None:
        end, _ = listener.accept()
        if answer is not None:
            end.sendall(answer)
        else:
            greeting = Greeting(bytes(NONCE_BYTES), proof_of(None, COORDINATOR, b""), "").encode()
            wrong = b"\x82\xa4type\xa7Refused\xa6reason\xa2\xff\xfe"
            end.sendall(HEAD.pack(len(greeting)) + greeting)
            end.recv(1)  # the peer's proof and hello
            end.sendall(HEAD.pack(len(wrong)) + wrong)
        while end.recv(1000):
            pass
        end.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(CoordinatorLost, match="no coordinator of ours"):
            CoordinatorClient(f"tcp://127.0.0.1:{port}", connect_timeout_s=PATIENCE_S)
        thread.join()


def test_a_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    file.write_text("[]")
    with pytest.raises(ConfigurationError, match=r"answers.json.*no socket"):
        Coordinator(f"ipc://{file}")
    assert file.read_text() == "[]"


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_public_addresses_are_warned_of(
    host: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = Coordinator(f"tcp://{host}:*")
    coordinator.stop()
    coordinator.run()
    assert ("no authentication" in caplog.text) == warns


def test_a_closed_client_says_so(coordinator: Coordinator) -> None:
    server = replica(coordinator.address)
    client = CoordinatorClient(coordinator.address)
    stream = client.stream([1])

    def answer() -> None:
        server.say(tokens_of({server.hear(Run).number: [7]}))

    thread = threading.Thread(target=answer)
    thread.start()
    assert next(stream).tokens == [7]
    thread.join()
    client.close()
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(CoordinatorLost, match="closed"):
        client.stats()
    server.close()
