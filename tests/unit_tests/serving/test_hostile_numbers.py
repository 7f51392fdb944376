"""No number, name or error of a peer's message ends a coordinator, or makes it unable to answer."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from megatron_async.errors import CoordinatorLost
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
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
    ReplicaHello,
    StepTokens,
    decode_for_coordinator,
    encode,
)
from tests.unit_tests.serving.told_service import Service, info, status

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


def test_an_error_that_nobody_has_thought_of_ends_its_peer_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
