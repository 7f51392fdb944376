"""What an administrator tells a whole service, what its engines do then, and its counters."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_async import LLM, DynamicInferenceEngine, SamplingParams
from megatron_async.serving.engine_verbs import PROFILE_VARIABLE, do_verb
from megatron_async.serving.messages import (
    PROTOCOL,
    Abort,
    Answer,
    Ask,
    ClientHello,
    Do,
    Done,
    Ended,
    Helping,
    Leaving,
    SetPaused,
    StepTokens,
)
from megatron_async.serving.service_counters import (
    HISTOGRAMS,
    Histogram,
    ServiceCounters,
    cumulative,
)
from tests.support.patience import PATIENCE_S
from tests.unit_tests.serving.told_service import Service


def tell(service: Service, number: int, what: str, **fields: Any) -> list[Any]:
    service.hear("client", Ask(number, what, fields=fields))
    return [m for m in service.take("client") if isinstance(m, Answer)]


def value(service: Service, what: str, **fields: Any) -> Any:
    (answer,) = tell(service, 99, what, **fields)
    assert answer.failure is None
    return answer.value


def refusal(service: Service, what: str, **fields: Any) -> str:
    (answer,) = tell(service, 99, what, **fields)
    assert answer.failure is not None
    assert answer.failure[0] == "ValueError"
    return str(answer.failure[1])


def state(service: Service) -> str:
    return str(value(service, "health")["state"])


def test_the_state_follows_replicas() -> None:
    service = Service()
    assert value(service, "health") == {"state": "loading", "replicas": 0}
    service.join("a")
    assert value(service, "health") == {"state": "running", "replicas": 1}
    service.lose("a")
    assert value(service, "health") == {"state": "restarting", "replicas": 0}
    service.dispatcher.verbs.is_given_up = True
    assert value(service, "health") == {"state": "dead", "replicas": 0}
    service.join("b")
    assert value(service, "health") == {"state": "running", "replicas": 1}


def test_a_paused_service_keeps_its_queue_and_who_joins_stands_still() -> None:
    service = Service("a", no_replica_timeout_s=2.0)
    service.ask(0)
    assert service.runs("a") == [0]
    assert value(service, "pause") == {"aborted": 0}
    assert service.take("a") == [SetPaused(True)]
    service.ask(1)
    assert SetPaused(True) in service.join("b")
    assert state(service) == "paused"
    assert value(service, "health")["replicas"] == 0
    service.lose("a")
    service.lose("b")
    service.wait(
        5.0, alive="client"
    )  # a queue is not failed for want of replicas that may not work
    assert service.dispatcher.stats()["queued_requests"] == 2
    service.join("c")
    assert value(service, "resume") == {}
    assert service.runs("c") == [0, 1]


def test_pausing_may_abort_first() -> None:
    service = Service("a")
    service.ask(0)
    service.runs("a")
    assert value(service, "pause", mode="abort") == {"aborted": 1}
    assert service.take("a") == [Abort(0), SetPaused(True)]
    assert "mode='later'" in refusal(service, "pause", mode="later")


def test_a_draining_service_finishes_and_refuses() -> None:
    service = Service("a")
    service.ask(0)
    assert value(service, "drain") == {"unfinished_requests": 1}
    service.ask(1)
    assert service.failure()[0] == "Overloaded"
    assert service.runs("a") == [0]
    service.end("a", 0)
    assert service.dispatcher.stats()["unfinished_requests"] == 0
    service.lose("a")
    assert state(service) == "draining"
    service.join("a")
    value(service, "resume")
    service.ask(2)
    assert len(service.runs("a")) == 1


def test_who_is_aborted_because_the_service_ends_is_told_so() -> None:
    service = Service("a")
    service.ask(0)
    value(service, "drain")
    value(service, "abort", all=True)
    service.take("client")
    failed = ("RequestAborted", "request 0 was aborted")
    service.hear("a", StepTokens(ends=[Ended(0, "aborted", failed, replica="a")]))
    kind, text = service.failure()
    assert kind == "RequestAborted"
    assert "the service ends" in text


def test_an_answer_that_ends_before_it_is_aborted_is_whole() -> None:
    """Also where the service takes no further requests: the abort was on its way."""
    service = Service("a")
    service.ask(0)
    value(service, "drain")
    value(service, "abort", all=True)
    service.take("client")
    service.end("a", 0)
    (ended,) = service.ends("client")
    assert (ended.finish_reason, ended.failure) == ("length", None)


def test_a_client_that_goes_while_the_service_ends_is_no_failure(caplog):
    for draining in (False, True):
        service = Service("a")
        service.ask(0)
        if draining:
            value(service, "drain")
        caplog.clear()
        with caplog.at_level("INFO"):
            service.lose("client")
        assert ("A client is gone" in caplog.text) == (not draining)
        assert ("1 requests are aborted, as the service ends" in caplog.text) == draining


def test_requests_are_aborted_by_their_label() -> None:
    service = Service("a")
    for number, label in enumerate(("x", "x", "y", "")):
        service.ask(number, label=label)
    service.take("a")
    assert value(service, "abort", label="x") == {"aborted": 2}
    assert service.take("a") == [Abort(0), Abort(1)]
    assert value(service, "abort", label="x' or '1") == {"aborted": 0}
    for fields in ({}, {"label": ""}, {"label": 7}, {"all": "yes"}):
        assert "label=ID" in refusal(service, "abort", **fields)
    assert value(service, "abort", all=True)["aborted"] >= 2


def test_a_sleeping_service_answers_when_all_replicas_sleep() -> None:
    service = Service("a", "b")
    assert tell(service, 1, "sleep") == []
    do = Do(0, "sleep")
    assert service.take("a") == service.take("b") == [SetPaused(True), do]
    service.hear("a", Done(0, {"freed_bytes": 5}))
    assert service.take("client") == []
    service.hear("a", Done(0, {"freed_bytes": 6}))  # told twice: nothing
    service.hear("b", Done(0, {"freed_bytes": 7}))
    (answer,) = service.take("client")
    assert answer == Answer(1, {"replicas": {"a": {"freed_bytes": 5}, "b": {"freed_bytes": 7}}})
    assert state(service) == "sleeping"
    assert "wake" in refusal(service, "resume")
    assert "never" in refusal(service, "drain")
    service.ask(0)
    assert tell(service, 2, "wake") == []
    assert service.take("a") == [Do(1, "wake")]  # no request before it is awake
    service.hear("a", Done(1))
    service.hear("b", Done(1, failure=("OutOfMemoryError", "no room")))
    (answer,) = service.take("client")
    assert answer.failure == ("RuntimeError", "b: OutOfMemoryError: no room")
    assert state(service) == "sleeping"
    assert tell(service, 3, "wake", tags=["weights"]) == []
    for name, told in ("a", "running"), ("b", "suspended"):
        service.hear(name, Done(2, {"state": told}))
    assert service.take("client")[0].failure is None
    assert state(service) == "sleeping", "the cache of one is not there"
    assert tell(service, 3, "wake") == []
    for name in ("a", "b"):
        service.hear(name, Done(3))
    assert service.take("client") == [Answer(3, {"replicas": {"a": {}, "b": {}}})]
    assert state(service) == "running"
    assert service.runs("a") + service.runs("b") == [0]


def test_nobody_waits_for_a_replica_that_is_gone() -> None:
    service = Service("a", "b")
    assert tell(service, 1, "reset_prefix_cache") == []
    service.hear("a", Done(0, {"ok": 1}))
    service.lose("b")
    assert service.take("client") == [Answer(1, {"replicas": {"a": {"ok": 1}}})]
    service.lose("a")
    assert value(service, "reset_prefix_cache") == {"replicas": {}}


def test_a_service_wakes_though_its_asker_is_gone() -> None:
    service = Service("a")
    tell(service, 1, "sleep")
    service.hear("a", Done(0))
    tell(service, 2, "wake")
    service.lose("client")
    service.hear("a", Done(1))
    service.hear("client", ClientHello(PROTOCOL))
    service.take("client")
    assert state(service) == "running"


@pytest.mark.parametrize("before", ["running", "paused"])
def test_a_sleep_that_all_replicas_refuse_changes_nothing(before: str) -> None:
    service = Service("a")
    if before == "paused":
        value(service, "pause")
    assert tell(service, 1, "sleep", tags=["weights"]) == []
    service.hear("a", Done(0, failure=("ValueError", "no memory of its own")))
    assert service.take("client")[0].failure is not None
    assert state(service) == before
    assert service.take("a")[-1] == SetPaused(False) or before == "paused"


def test_replicas_that_share_experts_stand_still_together() -> None:
    service = Service()
    for name in "ab":
        assert SetPaused(False) in service.join(name, shares_experts=True)
    service.ask(0)
    assert service.runs("a") == [0]
    service.hear("b", Helping())
    assert value(service, "pause") == {"aborted": 0}
    assert service.take("a") == service.take("b") == [SetPaused(True)]
    for what in ("pause", "resume", "remove"):
        service.hear("client", Ask(7, what, "a"))
        (answer,) = service.take("client")
        assert "resume the service first" in answer.failure[1], "alone it would wait for ever"
    assert value(service, "resume") == {}
    assert service.take("a") == service.take("b") == [SetPaused(False)]
    service.hear("a", Leaving())
    service.take("a")
    for fields in ({"what": "pause"}, {"what": "pause", "mode": "abort"}, {"what": "sleep"}):
        assert "it leaves" in refusal(service, **fields)
    assert service.take("a") == [], "nothing is aborted"


@pytest.mark.parametrize("what", ["explode", ""])
def test_unknown_commands_are_refused(what: str) -> None:
    assert refusal(Service("a"), what)


GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=6, termination_id=-1)


@pytest.fixture(scope="module")
def engine() -> Iterator[DynamicInferenceEngine]:
    with LLM("dummy:tiny", device="cpu", num_kv_blocks=32, block_size_tokens=16) as llm:
        yield llm.engine


def tokens(engine: DynamicInferenceEngine) -> list[int]:
    return engine.generate([list(range(1, 40))], GREEDY)[0].generated_tokens


def test_it_sleeps_and_wakes_to_the_same_tokens(engine: DynamicInferenceEngine) -> None:
    before = tokens(engine)
    value, failure = do_verb(engine, "r", "sleep", {})
    assert failure is None
    assert value["freed_bytes"] > 0
    assert engine.is_stopped
    assert do_verb(engine, "r", "wake", {}) == ({"state": "running"}, None)
    assert not engine.is_stopped
    fields = {"tags": ["kv_cache"], "copies": ["kv_cache"]}
    assert do_verb(engine, "r", "sleep", fields)[0]["freed_bytes"] > 0
    assert do_verb(engine, "r", "wake", {"tags": []}) == ({"state": "suspended"}, None)
    for what, wrong in (
        ("sleep", {"tags": "kv_cache"}), ("sleep", {"copies": 5}), ("wake", {"tags": [["a"]]}),
        ("wake", {"tags": {"cache": 1}}), ("sleep", {"tags": ["weights"]}),
    ):  # fmt: skip
        value, failure = do_verb(engine, "r", what, wrong)
        assert (value, failure[0]) == ({}, "ValueError")
        assert "must be a list of" in failure[1] or "enable_sleep_mode=True" in failure[1]
    assert engine.is_stopped
    assert do_verb(engine, "r", "wake", {"tags": ["kv_cache"]}) == ({"state": "running"}, None)
    assert tokens(engine) == before


def test_the_prefix_cache_is_forgotten(engine: DynamicInferenceEngine) -> None:
    tokens(engine)
    hits = engine.stats()["prefix_cache_hits"]
    tokens(engine)
    assert engine.stats()["prefix_cache_hits"] > hits
    hits = engine.stats()["prefix_cache_hits"]
    assert do_verb(engine, "r", "reset_prefix_cache", {}) == ({}, None)
    tokens(engine)
    assert engine.stats()["prefix_cache_hits"] == hits


def test_a_profile_is_written(engine: DynamicInferenceEngine, tmp_path, monkeypatch):
    monkeypatch.setenv(PROFILE_VARIABLE, str(tmp_path))
    start, stop = {"action": "start"}, {"action": "stop"}
    _, failure = do_verb(engine, "../r", "profile", stop)
    assert failure is not None
    assert "start one" in failure[1]
    assert do_verb(engine, "../r", "profile", start) == ({}, None)
    _, failure = do_verb(engine, "../r", "profile", start)
    assert failure is not None
    assert "already" in failure[1]
    tokens(engine)
    value, failure = do_verb(engine, "../r", "profile", stop)
    assert failure is None
    for thread in threading.enumerate():
        if thread.name == "save-profile":
            thread.join(PATIENCE_S)
    (file,) = tmp_path.iterdir()  # a replica's name leads to no other folder
    assert value["file"] == str(file)
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"forward_pass", "sampling"} <= names
    assert engine.tracer.timeline is None


def test_what_cannot_be_done_is_told(engine: DynamicInferenceEngine, monkeypatch):
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)
    for what, fields, part in (
        ("profile", {"action": "start"}, "--profile-dir"),
        ("profile", {"action": 5}, "action=5"),
        ("explode", {}, "explode"),
    ):
        value, failure = do_verb(engine, "r", what, fields)
        assert value == {}
        assert failure is not None
        assert part in failure[1]


def test_bounds_rise_and_hold_what_is_on_them() -> None:
    for bounds in HISTOGRAMS.values():
        assert list(bounds) == sorted(set(bounds))
    assert HISTOGRAMS["e2e_seconds"][:4] == (0.001, 0.002, 0.005, 0.01)
    assert HISTOGRAMS["prompt_tokens"][-1] == 1e6
    histogram = Histogram((1.0, 2.0))
    for value in (-3.0, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == pytest.approx(13.5)


def test_times_of_a_request_are_the_services() -> None:
    counters = ServiceCounters()
    told = {"num_prompt_tokens": 7, "num_cached_tokens": 4, "num_generated_tokens": 11}
    ended = Ended(0, "length", **told, queue_s=0.25, ttft=1.0, latency=3.0)
    counters.ended(ended, wait_s=0.5)
    sums = {name: histogram.total for name, histogram in counters.histograms.items()}
    assert sums == pytest.approx(
        {
            "queue_seconds": 0.75, "ttft_seconds": 1.5, "prefill_seconds": 0.75,
            "e2e_seconds": 3.5, "inference_seconds": 2.75, "decode_seconds": 2.0,
            "inter_token_seconds": 2.0, "prompt_tokens": 7, "generated_tokens": 11,
        }
    )  # fmt: skip
    assert sum(counters.histograms["inter_token_seconds"].counts) == 10
    assert (counters.prompt_tokens, counters.cached_tokens) == (7, 4)


def test_who_never_ran_says_nothing_of_times() -> None:
    counters = ServiceCounters()
    counters.ended(Ended(0, "error"), wait_s=3.0)
    counters.ended(Ended(0, "aborted"), wait_s=3.0)
    counters.ended(Ended(0, "of another version"), wait_s=3.0)
    counters.ended(Ended(0, "termination_id", num_generated_tokens=1, ttft=0.1, latency=0.1))
    assert counters.reasons["error"] == 2
    assert sum(counters.histograms["inter_token_seconds"].counts) == 0
    assert sum(counters.histograms["ttft_seconds"].counts) == 1
    told = counters.as_dict()["histograms"]["ttft_seconds"]
    pairs = cumulative("ttft_seconds", told["counts"])
    assert pairs[-1] == ("+Inf", 1.0)
    assert dict(pairs)["0.05"] == 0
    assert dict(pairs)["0.1"] == 1
