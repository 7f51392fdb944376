"""A dispatcher's rare cases: odd messages, odd moments, and what may not grow."""

from __future__ import annotations

import pytest

from megatron_async.serving.messages import (
    PROTOCOL,
    Abort,
    Again,
    Answer,
    Ask,
    ClientHello,
    Goodbye,
    Helping,
    Leave,
    Leaving,
    Refused,
    ReplicaHello,
    SetPaused,
    encode,
)
from tests.unit_tests.serving.told_service import Service, info, status


def ask(service: Service, number: int, what: str, name: str) -> tuple[str, str] | None:
    """Command a replica; returns why not."""
    service.hear("client", Ask(number, what, name))
    (answer,) = service.take("client")
    assert isinstance(answer, Answer)
    return answer.failure


def test_numbers_that_no_token_has() -> None:
    service = Service("a")
    service.ask(0, prompt=[2**64 - 1] * 8)
    service.ask(1, max_new_tokens=2**63)
    service.ask(2, max_new_tokens=-(2**62))
    assert service.runs("a") == [0, 1, 2]
    encode(Answer(0, service.dispatcher.stats()))
    assert service.dispatcher.stats()["replicas"]["a"]["unfinished_tokens"] > 0  # type: ignore[index]


@pytest.mark.parametrize("field", ["block_size_tokens", "slots", "kv_blocks"])
def test_a_replica_without_room_is_refused(field: str) -> None:
    service = Service()
    (refused,) = service.join("a", **{field: 0})
    assert f"{field}=0" in str(refused)
    service.ask(0)
    assert service.dispatcher.stats()["queued_requests"] == 1


def test_who_says_hello_again_begins_anew() -> None:
    service = Service("a")
    service.ask(0)
    service.hear("a", ReplicaHello(PROTOCOL, info("b")))
    assert list(service.dispatcher.stats()["replicas"]) == ["b"]  # type: ignore[call-overload]
    assert service.runs("a") == [0, 0]
    service.hear("client", ClientHello(PROTOCOL))
    assert Abort(0) in service.take("a")
    assert service.dispatcher.stats()["unfinished_requests"] == 0


def test_aborted_requests_leave_the_queue() -> None:
    service = Service("a", requests_per_slot=0.5)
    service.ask(0)
    service.ask(1)
    for number in range(2, 500):
        service.ask(number)
        service.hear("client", Abort(number))
    assert len(service.dispatcher.queue) == 1
    assert service.dispatcher.queue.entries < 100
    service.end("a", 0)
    assert service.runs("a") == [0, 1]


def test_a_paused_replica_that_leaves_goes_on() -> None:
    service = Service("a")
    service.ask(0)
    assert ask(service, 1, "pause", "a") is None
    service.take("a")
    service.hear("a", Leaving())
    assert service.take("a") == [SetPaused(False)]
    service.end("a", 0)
    assert service.take("a") == [Leave()]


def test_who_leaves_takes_no_further_commands() -> None:
    service = Service("a")
    service.ask(0)
    service.hear("a", Leaving())
    service.take("a")
    for what in ("resume", "pause", "drain"):
        failure = ask(service, 1, what, "a")
        assert failure is not None
        assert "it is leaving" in failure[1]
    assert ask(service, 1, "remove", "a") is None
    assert service.take("a") == []


def test_replicas_that_leave_are_not_waited_for() -> None:
    service = Service("a", no_replica_timeout_s=5)
    service.ask(0)
    service.hear("a", Leaving())
    service.ask(1)
    for _ in range(12):
        service.wait(0.5, alive="client")
        service.hear("a", status(1, tokens=5, steps=round(service.now)))
    kind, text = service.failure()
    assert kind == "ReplicaLost"
    assert "a (leaving)" in text
    service.end("a", 0)
    assert len(service.take("client")) == 1


def test_who_leaves_is_let_go_when_its_last_client_has_gone() -> None:
    service = Service("a")
    service.ask(0)
    service.hear("a", Leaving())
    service.take("a")
    service.lose("client")
    assert service.take("a") == [Abort(0), Leave()]


def test_a_replica_that_shares_its_experts_stays_and_helps() -> None:
    service = Service()
    for name in ("a", "b"):
        service.join(name, shares_experts=True)
    service.ask(0)
    service.ask(1)
    failure = ask(service, 2, "pause", "a")
    assert failure is not None
    assert "drain" in failure[1]
    assert service.runs("a") == [0]
    service.runs("b")
    assert ask(service, 3, "remove", "a") is None
    service.end("a", 0)
    service.take("client")
    assert service.take("a")[-1] == Leave()
    service.hear("a", Helping())
    assert ask(service, 3, "remove", "a") is None
    assert service.take("a") == []
    assert str(service.dispatcher.stats()["replicas"]["a"]["state"]) == "helping"  # type: ignore[index]
    service.ask(4)
    assert service.runs("b") == [2]
    service.hear("a", Goodbye())
    assert list(service.dispatcher.stats()["replicas"]) == ["b"]  # type: ignore[call-overload]


def test_who_helps_has_handed_over_what_it_had() -> None:
    service = Service("a", on_replica_death="fail")
    service.ask(0)
    service.say("a", 0, [5])
    service.take("client")
    service.hear("a", Leaving())
    service.join("b")
    service.hear("a", Helping())
    assert service.runs("b") == [0]
    service.say("a", 0, [9])
    service.end("a", 0)
    service.hear("a", Goodbye())
    assert service.take("client") == [Again(0)]


def test_odd_senders_change_nothing() -> None:
    service = Service("a")
    service.hear("a", Ask(1, "stats"))
    service.hear("client", Leaving())
    service.hear("stranger", Goodbye())
    assert isinstance(service.take("stranger")[0], Refused)
    assert not service.take("a")
