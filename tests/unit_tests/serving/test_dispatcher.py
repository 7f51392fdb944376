"""Choices of replicas as these and clients come, stop and leave: no sockets, made-up time."""

import math

import msgspec
import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.serving.messages import (
    PROTOCOL,
    Abort,
    Again,
    Answer,
    Ask,
    Card,
    ClientHello,
    Do,
    Done,
    Ended,
    Generate,
    Goodbye,
    Leave,
    Leaving,
    Moved,
    NewModel,
    ReplicaHello,
    Run,
    SetPaused,
    StepTokens,
    Welcome,
    decode_for_replica,
    encode,
)
from megatron_async.serving.records import CoordinatorConfig
from megatron_async.serving.routing import prompt_hashes
from tests.unit_tests.serving.told_service import PARAMS, Service, info, rows_of, status, tokens_of


def test_load_decides_and_what_does_not_fit_waits() -> None:
    service = Service("a", "b")
    for number in range(12):
        service.ask(number)
    assert service.runs("a") == [0, 2, 4, 6]
    assert service.runs("b") == [1, 3, 5, 7]
    service.end("b", 3)
    assert service.runs("b") == [8]
    (ended,) = service.ends("client")
    assert ended == Ended(3, "length", num_generated_tokens=1, replica="b", attempts=1)
    assert service.join("c") == [
        Welcome(8.0, wants_card=True),
        *(Run(number, [1, 2, 3], PARAMS, 0) for number in (9, 10, 11)),
    ]
    stats = service.dispatcher.stats()
    assert stats["unfinished_requests"] == 11
    assert stats["queued_requests"] == 0


def test_higher_priority_leaves_the_queue_first() -> None:
    service = Service("a", requests_per_slot=0.5)
    for number, priority in enumerate((0, 0, 5, 1)):
        service.ask(number, priority=priority)
    order = service.runs("a")
    for _ in range(3):
        service.end("a", order[-1])
        order += service.runs("a")
    assert order == [0, 2, 3, 1]


def test_reported_load_counts_beside_what_it_has_not_seen() -> None:
    service = Service("a", "b", requests_per_slot=50)
    service.hear("a", status(0, tokens=100))
    for number in range(4):
        service.ask(number, max_new_tokens=30)
    assert service.runs("b") == [0, 1, 2, 3]
    service.hear("b", status(4, tokens=0))
    service.ask(4, max_new_tokens=30)
    assert service.runs("b") == [4]


def test_a_client_is_told_that_its_tokens_come_again() -> None:
    """The coordinator keeps no tokens: it says once that what follows begins anew."""
    service = Service("a")
    service.ask(5)
    service.say("a", 0, [1, 2], "on")
    told = service.take("client")
    assert [rows_of(step) for step in told if isinstance(step, StepTokens)] == [[(5, [1, 2])]]
    assert [step.texts for step in told if isinstance(step, StepTokens)] == [[(5, "on")]]
    service.lose("a")
    assert service.take("client") == [Again(5)]
    service.say("a", 0, [3])
    assert service.take("client") == [], "the dead has nothing to say"
    service.join("b")
    service.lose("b")
    assert service.take("client") == [], "nothing was told since"


def test_a_step_is_divided_by_client_and_by_whom_it_concerns() -> None:
    service = Service("a", "b", requests_per_slot=50)
    service.hear("client2", ClientHello(PROTOCOL))
    service.hear("a", status(0, tokens=10**6))
    for number in range(3):
        service.ask(number)
    service.hear("client2", Generate(0, [1], PARAMS, 5, 0))
    service.hear("client2", Generate(1, [1], PARAMS, 5, 0))
    assert service.runs("b") == [0, 1, 2, 3, 4]
    service.hear("a", tokens_of({0: [1], 3: [2]}))
    assert service.tokens("client") + service.tokens("client2") == [], "it does not serve them"
    step = tokens_of({4: [9, 8], 0: [], 77: [5], 2: [4], 3: [6]})
    step.ends += [Ended(2, "length"), Ended(3, "length"), Ended(78, "length")]
    service.hear("b", step)
    (mine,), (other,) = service.take("client"), service.take("client2")
    assert isinstance(mine, StepTokens)
    assert isinstance(other, StepTokens)
    assert rows_of(mine) == [(0, []), (2, [4])]
    assert rows_of(other) == [(1, [9, 8]), (0, [6])]
    assert [end.number for end in mine.ends + other.ends] == [2, 0]
    assert not service.dispatcher.requests[0].has_started
    assert service.dispatcher.requests[4].has_started


def test_limits_of_an_owner_and_of_tokens() -> None:
    service = Service("a", max_tokens_in_flight=60, max_unfinished_of_owner=2)
    service.ask(0, owner="x", max_new_tokens=7)
    service.ask(1, owner="x", max_new_tokens=7)
    service.ask(2, owner="x", max_new_tokens=7)
    kind, text = service.failure()
    assert kind == "Overloaded"
    assert "max_unfinished_of_owner is 2" in text
    service.ask(3, owner="y", max_new_tokens=30)
    assert service.ends("client") == []
    service.ask(4, max_new_tokens=30)
    assert "max_tokens_in_flight is 60" in service.failure()[1]
    assert service.dispatcher.stats()["unfinished_tokens"] == 53
    service.end("a", 0)
    service.take("client")
    service.ask(5, owner="x", max_new_tokens=7)
    assert service.ends("client") == []
    for number in (1, 2, 3):
        service.end("a", number)
    assert service.dispatcher.stats()["unfinished_tokens"] == 0
    service.ask(6, max_new_tokens=1000)
    assert [end.failure for end in service.ends("client")] == [None] * 3, "alone it is served"


def test_a_card_is_kept_once_and_a_new_one_is_told_of() -> None:
    service = Service()
    assert service.join("a", card="x")[0] == Welcome(8.0, wants_card=True)
    service.hear("client", Ask(1, "card", fields={"digest": ""}))
    service.hear("a", Card("x", b"data"))
    service.hear("client", Ask(2, "card", fields={"digest": ""}))
    service.hear("client", Ask(3, "card", fields={"digest": "x"}))
    assert service.take("client") == [
        Answer(1), Answer(2, {"digest": "x", "card": b"data"}), Answer(3, {"digest": "x"}),
    ]  # fmt: skip
    assert service.join("b", card="x")[0] == Welcome(8.0, wants_card=False)
    assert "tokenizer" in str(service.join("c", card="y"))
    service.lose("a")
    service.lose("b")
    service.join("c", card="y")
    service.hear("c", Card("y", b"other"))
    assert service.take("client") == [NewModel()]


def test_no_replica_is_waited_for_only_so_long() -> None:
    service = Service("a", no_replica_timeout_s=5)
    service.lose("a")
    service.ask(0)
    service.wait(4.5, alive="client")
    assert service.take("client") == []
    service.wait(1, alive="client")
    kind, text = service.failure()
    assert kind == "ReplicaLost"
    assert "a: killed" in text


def test_more_than_fits_is_refused() -> None:
    service = Service("a", max_unfinished=3)
    for number in range(4):
        service.ask(number)
    kind, text = service.failure()
    assert kind == "Overloaded"
    assert "max_unfinished is 3" in text
    service.end("a", 0)
    service.take("client")
    service.ask(4)
    assert service.take("client") == []


def test_pause_drain_resume_and_remove() -> None:
    service = Service("a", "b")
    service.ask(0)
    service.ask(1)
    service.hear("client", Ask(9, "drain", "a"))
    service.hear("client", Ask(10, "pause", "b"))
    assert service.take("client") == [Answer(9), Answer(10)]
    assert service.take("a")[-1] == SetPaused(False)
    assert service.take("b")[-1] == SetPaused(True)
    service.ask(2)
    assert service.runs("a") + service.runs("b") == []
    service.hear("client", Ask(11, "resume", "b"))
    assert service.take("b") == [SetPaused(False), Run(2, [1, 2, 3], PARAMS, 0)]
    service.hear("client", Ask(12, "remove", "a"))
    assert Leave() not in service.take("a")
    service.end("a", 0)
    assert service.take("a") == [Leave()]
    service.hear("a", Goodbye())
    assert list(service.dispatcher.stats()["replicas"]) == ["b"]  # type: ignore[call-overload]
    service.take("client")
    service.hear("client", Ask(13, "pause", "a"))
    assert service.take("client") == [
        Answer(13, failure=("ValueError", "there is no replica named 'a'; there are: b."))
    ]


def test_who_leaves_finishes_or_hands_over() -> None:
    service = Service("a", "b", on_replica_death="fail")
    service.ask(0)
    service.hear("a", Leaving())
    service.ask(1)
    service.ask(2)
    assert service.runs("b") == [1, 2]
    service.hear("a", Goodbye())  # it does not wait for its request
    assert service.runs("b") == [0]
    service.hear("b", Goodbye("RankLost: rank 1"))
    assert all("RankLost: rank 1" in str(m) for m in service.take("client"))


MOVED = {"generated": [7]}


def test_requests_move_to_other_replicas_and_their_streams_go_on() -> None:
    """The client hears nothing of it. A replica that dies with one before its next token loses
    nothing that was told. Break `_hand_over`: leave `moved` where a token was told since."""
    service = Service("a", "b", requests_per_slot=50)
    service.ask(0, label="l0")
    service.start("a", 0)
    assert service.runs("a") == [0]
    service.take("client")
    service.hear("b", status(0, tokens=500))  # or its own replica would be the better one
    service.hear("client", Ask(9, "move", fields={"label": "l0"}))
    assert service.take("a") == [Do(0, "move", {"numbers": [0]})]
    service.hear("a", Moved(0, MOVED))
    service.hear("a", Done(0, {"moved": 1}))
    assert service.take("client") == [Answer(9, {"replicas": {"a": {"moved": 1}}})]
    again = Run(0, [1, 2, 3], PARAMS, 0, label="l0", moved=MOVED)
    assert service.take("b") == [again]
    service.say("a", 0, [8])
    assert service.take("client") == [], "it has left"
    service.lose("b")
    assert service.take("client") == [], "no token was told since"
    assert again in service.take("a")
    service.say("a", 0, [8])
    assert service.tokens("client") == [(0, [8])]
    service.join("b")
    service.lose("a")
    assert Again(0) in service.take("client")
    (begun,) = [m for m in service.take("b") if isinstance(m, Run) and m.number == 0]
    assert begun.moved == {}
    assert service.dispatcher.stats()["moved_requests"] == 1


def test_all_of_a_replica_moves_also_as_it_leaves() -> None:
    service = Service("a", "b", requests_per_slot=50)
    for number in range(4):
        service.ask(number)
    service.runs("a"), service.runs("b")
    service.hear("client", Ask(9, "move", fields={"replica": "a"}))
    assert service.take("a") == [SetPaused(False), Do(0, "move", {"numbers": [0, 2]})]
    service.hear("client", Abort(2))
    for number in (0, 2, 77):
        service.hear("a", Moved(number, MOVED))
    service.hear("a", Done(0, {"moved": 2}))
    assert service.runs("b") == [0]
    assert [end.failure[0] for end in service.ends("client") if end.failure] == ["RequestAborted"]
    service.ask(5)
    assert service.runs("a") == [], "it gets no more"
    service.hear("client", Ask(10, "move", fields={"replica": "b"}))
    (answer,) = service.take("client")
    assert "no other replica is ready" in str(answer)
    service.hear("client", Ask(11, "resume", "a"))
    service.hear("client", Ask(12, "remove", "b"))
    service.hear("client", Ask(13, "move", fields={"replica": "b"}))
    service.take("b")
    for number in (0, 1, 3, 4):
        service.hear("b", Moved(number, MOVED))
    assert service.take("b") == [Leave()]
    assert sorted(service.runs("a")) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    "fields", [{}, {"label": 5}, {"label": "x", "replica": "a"}, {"replica": ["a"]}]
)
def test_what_moves_is_said(fields: dict[str, object]) -> None:
    service = Service("a", "b")
    service.hear("client", Ask(9, "move", fields=fields))
    (answer,) = service.take("client")
    assert "label=ID, or replica=NAME" in str(answer)


def test_aborts_wherever_the_request_is() -> None:
    service = Service("a", requests_per_slot=0.5)
    service.ask(0)
    service.ask(1)
    service.hear("client", Abort(1))
    assert service.failure()[0] == "RequestAborted"
    service.hear("client", Abort(0))
    assert service.take("a")[-1] == Abort(0)
    service.lose("a")
    assert service.failure()[0] == "RequestAborted"
    service.hear("client", Abort(0))


def test_who_does_not_fit_is_refused() -> None:
    service = Service("a")
    (refused,) = service.join("b", model={"model": "other"})
    assert "model is 'other' and not 'tiny'" in str(refused)
    service.hear("x", ReplicaHello(PROTOCOL, info("a", instance="another")))
    assert "a replica named 'a' is there" in str(service.take("x"))
    service.hear("y", ClientHello(PROTOCOL + 1))
    assert "same version" in str(service.take("y"))


def test_a_replica_that_connects_again_replaces_itself() -> None:
    service = Service("a")
    service.ask(0)
    service.take("a")
    service.hear("new", ReplicaHello(PROTOCOL, info("a")))
    again = Run(0, [1, 2, 3], PARAMS, 0)
    assert service.take("new") == [Welcome(8.0, wants_card=True), again]
    assert len(service.dispatcher.replicas) == 1


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="on_replica_death='maybe'"):
        CoordinatorConfig(on_replica_death="maybe")
    for name in ("silence_s", "stall_s", "client_silence_s", "no_replica_timeout_s"):
        with pytest.raises(ConfigurationError, match=f"{name}=0"):
            CoordinatorConfig(**{name: 0})
        with pytest.raises(ConfigurationError, match=name):
            CoordinatorConfig(**{name: math.nan})
    with pytest.raises(ConfigurationError, match="max_retries=-1"):
        CoordinatorConfig(max_retries=-1)
    for name in ("silence_s", "stall_s", "client_silence_s"):
        with pytest.raises(ConfigurationError, match=f"{name}=0.7.*ping_interval_s=0.5"):
            CoordinatorConfig(**{name: 0.7})
    with pytest.raises(ConfigurationError, match=r"silence_s=1e.20 must be at most 86400"):
        CoordinatorConfig(silence_s=1e20)


def test_a_cache_that_has_lost_a_prefix_does_not_attract() -> None:
    """Break `ReplicaRecord.heard` so that it forgets nothing, and it fails."""
    prompt = list(range(40))
    service = Service("a", "b")
    service.ask(0, prompt=prompt)
    service.hear("b", status(0, tokens=0))
    assert service.runs("a") == [0]
    service.end("a", 0)
    service.hear("a", status(1, tokens=30))
    service.ask(1, prompt=prompt)
    assert service.runs("a") == [1], "it has served this, and has little more to do"
    service.end("a", 1)
    lost = prompt_hashes(prompt, 4)
    service.hear("a", msgspec.structs.replace(status(2, tokens=30), lost_blocks=lost))
    service.ask(2, prompt=prompt)
    assert (service.runs("a"), service.runs("b")) == ([], [2])


def test_what_a_replica_is_yet_to_compute_is_not_forgotten() -> None:
    """A replica has told what it has lost before it knew of the request that will bring it back."""
    prompt = list(range(40))
    service = Service("a", "b")
    service.ask(0, prompt=prompt)
    late = msgspec.structs.replace(status(0), lost_blocks=prompt_hashes(prompt, 4))
    service.hear("a", late)
    service.ask(1, prompt=prompt)
    assert service.runs("a") == [0, 1]


def test_what_is_found_is_no_load() -> None:
    service = Service("a")
    replica = next(iter(service.dispatcher.replicas.values()))
    prompt, tokens = list(range(40)), 40 + 10
    service.ask(0, prompt=prompt)
    assert replica.candidate().unfinished_tokens == tokens
    service.ask(1, prompt=prompt)
    assert replica.candidate().unfinished_tokens == 2 * tokens - 40


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def test_a_trace_goes_with_its_request_to_each_replica(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "megatron_async")
    service = Service("a")
    service.ask(0)
    service.ask(1, traceparent=TRACEPARENT)
    plain, traced = service.take("a")
    assert plain == Run(0, [1, 2, 3], PARAMS, 0)
    assert traced == Run(1, [1, 2, 3], PARAMS, 0, TRACEPARENT)
    assert b"traceparent" not in encode(plain)  # a request without a trace is as long as ever
    assert decode_for_replica(encode(plain)) == plain
    assert decode_for_replica(encode(traced)) == traced
    service.end("a", 0)  # or it would be the first suspect
    service.lose("a")
    assert Run(1, [1, 2, 3], PARAMS, 0, TRACEPARENT) in service.join("b")
    service.lose("b")  # before its first token, once more: it is not served again
    lines = [r.getMessage() for r in caplog.records if TRACE in r.getMessage()]
    name = f"Request 1 (trace {TRACE})"
    assert lines[:3] == [
        f"{name} goes to replica a.", f"{name} is served again.", f"{name} goes to replica b.",
    ]  # fmt: skip
    assert lines[3].startswith(f"{name} ended (ReplicaLost): replica b")
    assert not [r for r in caplog.records if "Request 0" in r.getMessage()]


def test_the_protocol_has_the_version_of_its_messages() -> None:
    """A change of what is sent raises `PROTOCOL`, and stands here too."""
    assert PROTOCOL == 16
    assert Run.__struct_fields__ == (
        "number", "prompt", "params", "priority", "traceparent", "label", "moved",
    )  # fmt: skip
    assert Generate.__struct_fields__ == (
        "number", "prompt", "params", "max_new_tokens", "priority", "label", "owner",
        "traceparent",
    )  # fmt: skip
    assert Do.__struct_fields__ == ("number", "what", "fields")  # "confirm": of which signal
