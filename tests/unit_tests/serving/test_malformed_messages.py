"""Sockets on which something else is said than was agreed, or nobody reads; numbers and names of
which none ends a coordinator."""

import copy
import logging
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
    UNREADABLE,
    Abort,
    Ask,
    Card,
    ClientHello,
    Done,
    Ended,
    Generate,
    Message,
    PromptLogProbs,
    Refused,
    ReplicaHello,
    ReplicaInfo,
    Run,
    StepTokens,
    Welcome,
    decode_for_coordinator,
    decode_for_replica,
    encode,
)
from megatron_async.serving.model_card import ModelCard
from megatron_async.serving.records import CoordinatorConfig
from megatron_async.serving.secret import COORDINATOR, proof_of
from tests.support.patience import PATIENCE_S, eventually
from tests.support.plain_peer import Peer, running
from tests.unit_tests.serving.told_service import Service, info, status, tokens_of

PARAMS = msgspec.Raw(msgspec.msgpack.encode({}))


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    config = CoordinatorConfig(ping_interval_s=0.1)
    with running(Coordinator("tcp://127.0.0.1:*", config)) as found:
        yield found


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
def test_who_does_not_read_is_lost(coordinator: Coordinator, monkeypatch, limit: str, most: int):
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
    """The fault is said at once: to wait would not help."""

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
def test_public_addresses_are_warned_of(host: str, warns: bool, caplog):
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


EXTREMES = (2**64 - 1, 2**63, 2**63 - 1, 2**31, -1, -(2**63), float("nan"), float("inf"), -1e308)
WHOLE = Ended(
    0, "length", None, 1, 1, 1, 1, b"", PromptLogProbs(1, b""), 1.0, 1.0, 1.0, "a", "a", 1, b""
)
OF_CLIENT: list[Message] = [
    ClientHello(PROTOCOL),
    Generate(7, [1, 2], msgspec.Raw(b"\x80"), 3, 1, "a", "b"),
    Abort(7),
    Ask(7, "stats"),
    Ask(7, "profile", fields={"action": 1}),
]
OF_REPLICA: list[Message] = [
    ReplicaHello(PROTOCOL, info("a")),
    status(1, 1, 1),
    StepTokens(texts=[(0, "a")], ends=[WHOLE]),
    Done(0, {"a": 1}),
    Card("a", b""),
]


def changed(value: Any) -> Iterator[Any]:
    """The message with each of its numbers replaced by each extreme."""
    keys: Any = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        inner = value[key]
        if isinstance(inner, dict | list):
            for other in changed(inner):
                found = copy.copy(value)
                found[key] = other
                yield found
        elif isinstance(inner, int | float) and not isinstance(inner, bool):
            for extreme in EXTREMES:
                found = copy.copy(value)
                found[key] = extreme
                yield found


@pytest.mark.parametrize("who", ["client", "a"])
def test_no_number_ends_a_coordinator(who: str) -> None:
    tried = read = 0
    for message in OF_CLIENT if who == "client" else OF_REPLICA:
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        for hostile in changed(plain):
            tried += 1
            try:
                heard = decode_for_coordinator(msgspec.msgpack.encode(hostile))
            except UNREADABLE:
                continue
            read += 1
            service = Service("a")
            for number in (0, 1):
                service.ask(number)
                service.hear(who, heard)
            service.wait(1.0, alive="client")
            encode(service.dispatcher.stats())
            for sent in service.sent.values():
                for each in sent:
                    encode(each)
    assert read > 10
    assert tried - read > 20


def test_sums_stay_numbers_that_can_be_sent() -> None:
    """What a replica tells of requests is added up for as long as the coordinator runs."""
    ended = msgspec.to_builtins(StepTokens(ends=[Ended(0, "length", num_cached_tokens=2**64 - 1)]))
    with pytest.raises(msgspec.ValidationError, match="num_cached_tokens"):
        decode_for_coordinator(msgspec.msgpack.encode(ended))


def test_a_clock_that_is_set_makes_no_message_unreadable() -> None:
    years = 60.0 * 365 * 86400
    ended = Ended(0, "length", ttft=-years, latency=years, queue_s=0.0)
    heard: Any = decode_for_coordinator(encode(StepTokens(ends=[ended])))
    assert heard.ends == [ended]


def test_names_and_reasons_stay_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_async")
    service = Service("a")
    forged = "b\nreplica c is gone\x1b[31m"
    refusal = service.join(forged)[0]
    assert "printable" in msgspec.to_builtins(refusal)["reason"]
    service.ask(0)
    for who, goodbye in (("a", forged), ("client", forged)):
        message = {"type": "Goodbye", "failure": goodbye * 1000}
        service.hear(who, decode_for_coordinator(msgspec.msgpack.encode(message)))
    assert len(caplog.messages) >= 3
    for line in caplog.messages:
        assert line.isprintable(), line
        assert len(line) < 1000


def test_an_error_that_nobody_has_thought_of_ends_its_peer_alone(monkeypatch, caplog):
    coordinator = Coordinator("tcp://127.0.0.1:*")
    hear = coordinator.dispatcher.hear

    def hear_or_fail(identity: bytes, message: Any, now: float) -> None:
        if isinstance(message, Ask) and message.what == "drain":
            raise ZeroDivisionError("a fault")
        hear(identity, message, now)

    monkeypatch.setattr(coordinator.dispatcher, "hear", hear_or_fail)
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    address = coordinator.address
    with CoordinatorClient(address) as other:
        for _ in range(3):
            with (
                CoordinatorClient(address) as client,
                pytest.raises(CoordinatorLost, match="a fault"),
            ):
                client.drain_replica("a")
        assert other.stats()["clients"] == 1
    coordinator.stop()
    thread.join(5)
    assert not thread.is_alive()
    for told in ("type Ask is not followed", "A peer is refused"):
        assert sum(told in line for line in caplog.messages) == 1, "three times in a second"
