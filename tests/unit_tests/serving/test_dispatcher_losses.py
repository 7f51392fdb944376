"""What becomes of requests when replicas and clients are lost: no sockets, made-up time."""

from megatron_async.serving.messages import Abort, Refused, Run
from tests.unit_tests.serving.told_service import PARAMS, Service, status, tokens_of


def test_a_lost_replicas_requests_are_served_again_with_their_numbers() -> None:
    service = Service("a", "b")
    for number in range(4):
        service.ask(number)
    assert service.runs("a") == [0, 2]
    assert service.runs("b") == [1, 3]
    service.lose("a")
    assert service.runs("b") == [0]  # one suspect at a time
    service.end("a", 0)  # a last word of the dead
    assert service.take("client") == []
    service.end("b", 0)
    assert service.runs("b") == [2]
    (ended,) = service.ends("client")
    assert ended.attempts == 2
    service.start("b", 2)
    service.lose("b")
    assert service.dispatcher.stats()["queued_requests"] == 3
    assert service.join("c")[1:] == [Run(1, [1, 2, 3], PARAMS, 0)]
    for number, following in ((1, [2]), (2, [3]), (3, [])):
        service.start("c", number)
        assert service.runs("c") == following


def test_retries_end_and_the_policy_may_be_to_fail() -> None:
    service = Service("a", max_retries=1)
    service.ask(0)
    service.lose("a")
    service.join("b")
    service.start("b", 0)
    service.lose("b")
    kind, text = service.failure()
    assert kind == "ReplicaLost"
    assert "replica b" in text
    assert "2 replicas tried" in text
    service = Service("a", "b", on_replica_death="fail")
    service.ask(0)
    service.lose("a")
    assert "on_replica_death=fail" in service.failure()[1]
    assert service.runs("b") == []


def test_who_kills_two_replicas_before_its_first_token_is_not_served_again() -> None:
    service = Service("a", "b", "c", max_retries=5)
    service.ask(0)
    service.lose("a")
    assert service.runs("b") == [0]
    service.lose("b")
    kind, text = service.failure()
    assert kind == "ReplicaLost"
    assert "replica number 2 that died before the request's first token" in text
    assert service.runs("c") == []


def test_what_was_on_the_same_replicas_as_a_killer_is_served() -> None:
    service = Service("a", requests_per_slot=50)
    for number in range(6):
        service.ask(number)
    service.ask(6)
    service.say("a", 6, [7])
    killer, served = 3, set()
    service.take("client")
    service.lose("a")
    for name in ("b", "c"):
        service.join(name)
        service.say(name, 6, [7])
        while name.encode() in service.dispatcher.replicas:
            has = service.dispatcher.replicas[name.encode()].requests
            suspects = [number for number, request in has.items() if request.is_suspect]
            assert len(suspects) <= 1
            if killer in has:
                service.lose(name)
            elif suspects:
                service.start(name, suspects[0])
            else:
                break
    for number in list(service.dispatcher.replicas[b"c"].requests):
        service.end("c", number)
    for ended in service.ends("client"):
        if ended.failure is None:
            served.add(ended.number)
    assert served == {0, 1, 2, 4, 5, 6}


def test_a_request_that_has_started_is_served_again_as_often_as_allowed() -> None:
    service = Service("a", max_retries=3)
    service.ask(0)
    for name, following in ("ab", "bc", "cd"):
        service.say(name, 0, [7])
        service.lose(name)
        service.join(following)
    service.end("d", 0)
    assert service.ends("client")[-1].attempts == 4


def test_a_silent_and_a_stalled_replica_are_lost() -> None:
    service = Service("a", "b", silence_s=8, stall_s=20)
    service.ask(0)
    service.wait(7.5, alive="b client")
    assert service.runs("b") == []
    service.wait(1, alive="b client")
    assert service.runs("b") == [0]
    assert isinstance(service.take("a")[-1], Refused)
    service.hear("a", status(1))
    assert "connect again" in str(service.take("a")[-1])
    service.start("b", 0)
    service.join("c")
    for _ in range(41):
        service.wait(0.5, alive="c client")
        service.hear("b", status(1, tokens=10, steps=3))
    assert service.runs("c") == [0]


def test_a_lost_clients_requests_are_aborted() -> None:
    service = Service("a", requests_per_slot=0.5)
    service.ask(0)
    service.ask(1)
    service.take("a")
    service.lose("client")
    assert service.take("a") == [Abort(0)]
    assert service.dispatcher.stats()["unfinished_requests"] == 0
    service.end("a", 0)
    assert service.take("client") == []


def test_a_silent_clients_requests_are_aborted() -> None:
    service = Service("a", client_silence_s=3)
    service.ask(0)
    service.take("a")
    service.wait(2.5, alive="a")
    assert service.take("a") == []
    service.wait(1, alive="a")
    assert service.take("a") == [Abort(0)]
    assert isinstance(service.take("client")[-1], Refused)


def test_tokens_that_do_not_fit_together_are_a_lost_replica() -> None:
    service = Service("a", "b")
    service.ask(0)
    service.runs("a")
    wrong = tokens_of({0: [1, 2]})
    wrong.tokens = wrong.tokens[:-4]
    service.hear("a", wrong)
    assert "cannot be read" in str(service.take("a"))
    assert service.runs("b") == [0]
