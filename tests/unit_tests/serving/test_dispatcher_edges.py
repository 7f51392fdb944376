"""A dispatcher's rare cases and random orders of events; routing by load and shared prefixes."""

import random
import subprocess
import sys

import numpy as np
import pytest

from megatron_async.planning.prefix_hashes import block_hashes
from megatron_async.serving.messages import (
    PROTOCOL,
    Abort,
    Again,
    Answer,
    Ask,
    ClientHello,
    Do,
    Done,
    Generate,
    Goodbye,
    Helping,
    Leave,
    Leaving,
    Moved,
    Refused,
    ReplicaHello,
    Run,
    SetPaused,
    StepTokens,
    encode,
)
from megatron_async.serving.records import ReplicaState
from megatron_async.serving.routing import (
    MOST_PREFIX_BLOCKS,
    POLICIES,
    Candidate,
    PrefixTable,
    RoutingPolicy,
    prompt_hashes,
)
from tests.unit_tests.serving.told_service import PARAMS, Service, info, status


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


STEPS = 120


class RandomService(Service):
    """Two clients and replicas that do anything they may, and some things that they may not; `seed`
    draws it."""

    def __init__(self, seed: int) -> None:
        super().__init__(requests_per_slot=1.0, max_unfinished=20, no_replica_timeout_s=3.0)
        self.random = random.Random(seed)
        self.asked: dict[str, set[int]] = {}
        self.answered: dict[str, list[int]] = {}
        self.has: dict[str, set[int]] = {}
        self._numbers = iter(range(10_000))
        self._connections = iter(range(10_000))
        self.lose("client")

    def hears(self) -> None:
        """Everybody reads what was sent, and answers."""
        while self.sent:
            name = next(iter(self.sent))
            for message in self.take(who := name.decode()):
                if isinstance(message, StepTokens):
                    self.answered[who] += [ended.number for ended in message.ends]
                elif isinstance(message, Run) and who in self.has:
                    self.has[who].add(message.number)
                elif isinstance(message, Do) and who in self.has:
                    for number in message.fields["numbers"]:
                        self.has[who].discard(number)
                        self.hear(who, Moved(number, {"generated": [7]}))
                    self.hear(who, Done(message.number))
                elif isinstance(message, Leave) and who in self.has:
                    stays = self.random.random() < 0.5
                    if not stays:
                        del self.has[who]
                    self.hear(who, Helping() if stays else Goodbye())

    def step(self) -> None:
        """Something happens."""
        event = self.random.choice(
            [
                self._connect, self._join, self._submit, self._submit, self._submit, self._abort,
                self._end, self._end, self._lose_client, self._lose_replica, self._command,
                self._speak, self._pass_time,
            ]
        )  # fmt: skip
        event()
        self.hears()
        self.check()

    def check(self) -> None:
        """All books agree."""
        dispatcher = self.dispatcher
        queued = dispatcher.queue.in_order()
        for number, request in dispatcher.requests.items():
            assert (request.replica is None) == (request in queued)
            if request.replica is not None:
                assert dispatcher.replicas[request.replica.identity].requests[number] is request
            client = dispatcher.clients[request.client]
            assert client.requests[request.asked.number] is request
        helpers = [r for r in dispatcher.replicas.values() if r.state == ReplicaState.HELPING]
        assert not any(replica.requests for replica in helpers)
        held = sum(len(replica.requests) for replica in dispatcher.replicas.values())
        assert held + len(queued) == len(dispatcher.requests)
        for who, numbers in self.answered.items():
            assert len(set(numbers)) == len(numbers)
            waits = dispatcher.clients[who.encode()].requests.keys()
            assert self.asked[who] == set(numbers) | waits

    def finish(self) -> None:
        """A replica comes that serves whatever is left."""
        for who in list(self.has):
            self._lose_replica(who)
        self._join()
        for _ in range(50):
            self.hears()
            for who, numbers in self.has.items():
                for number in list(numbers):
                    numbers.discard(number)
                    self.end(who, number)
        self.check()
        assert not self.dispatcher.requests

    def _one(self, names: dict[str, set[int]]) -> str:
        return self.random.choice([*names, "nobody"])

    def _connect(self) -> None:
        who = f"client{next(self._connections)}"
        self.hear(who, ClientHello(PROTOCOL))
        self.asked[who], self.answered[who] = set(), []

    def _join(self) -> None:
        who = f"r{next(self._connections)}"
        self.has[who] = set()
        self.hear(who, ReplicaHello(PROTOCOL, info(who)))

    def _submit(self) -> None:
        who = self._one(self.asked)
        number = next(self._numbers)
        if who in self.asked:
            self.asked[who].add(number)
        priority = self.random.randrange(3)
        self.hear(who, Generate(number, [1, 2], PARAMS, 5, priority))

    def _abort(self) -> None:
        who = self._one(self.asked)
        numbers = [*self.asked.get(who, ()), 77_777]
        self.hear(who, Abort(self.random.choice(numbers)))

    def _end(self) -> None:
        who = self._one(self.has)
        for number in list(self.has.get(who, ()))[:1]:
            self.say(who, number, [7])
            self.has[who].discard(number)
            self.end(who, number)

    def _lose_client(self) -> None:
        who = self._one(self.asked)
        self.asked.pop(who, None)
        self.answered.pop(who, None)
        self.lose(who)

    def _lose_replica(self, who: str = "") -> None:
        who = who or self._one(self.has)
        self.has.pop(who, None)
        if self.random.random() < 0.5:
            self.lose(who)
        else:
            self.hear(who, Goodbye(self.random.choice(["", "RankLost"])))

    def _command(self) -> None:
        if self.asked:
            what = self.random.choice(["pause", "drain", "resume", "remove", "stats", "jump"])
            self.hear(next(iter(self.asked)), Ask(1, what, self._one(self.has)))
            moves = Ask(2, "move", fields={"replica": self._one(self.has)})
            self.hear(next(iter(self.asked)), moves)

    def _speak(self) -> None:
        who = self._one(self.has)
        busy = 10 * len(self.has.get(who, ()))
        message = self.random.choice([Leaving(), Leaving(), Helping(), status(99, busy), Abort(0)])
        self.hear(who, message)

    def _pass_time(self) -> None:
        self.wait(self.random.choice([0.5, 2.0]), alive=" ".join([*self.asked, *self.has]))


@pytest.mark.parametrize("seed", range(0, 100, 20))
def test_every_request_has_one_answer(seed: int) -> None:
    for each in range(seed, seed + 20):
        service = RandomService(each)
        for _ in range(STEPS):
            service.step()
        service.finish()


POLICY = RoutingPolicy(slack_tokens=100, slack_ratio=0.25)


def candidate(name: str, tokens: int = 0, free: int = 99, requests: int = 0) -> Candidate:
    return Candidate(name, tokens, free, requests, PrefixTable(1000))


def test_hashes_cover_all_blocks_before() -> None:
    first, second = prompt_hashes([1, 2, 3, 4, 5], 2)
    assert prompt_hashes([1, 2, 3], 2) == [first]
    assert prompt_hashes([9, 2, 3, 4], 2)[1] != second
    assert prompt_hashes([1], 2) == []
    assert len(prompt_hashes([7] * 10_000, 2)) == MOST_PREFIX_BLOCKS
    assert len(prompt_hashes("x" * 100_000, 2)) == MOST_PREFIX_BLOCKS
    assert len(prompt_hashes("x" * 16, 2)) == 2
    assert prompt_hashes("abcdefgh", 2) != prompt_hashes("abcdefgx", 2)


def test_blocks_are_those_of_the_engines_cache() -> None:
    tokens = list(range(100))
    assert prompt_hashes(tokens, 16) == block_hashes(np.array(tokens), 16)
    assert prompt_hashes([1, 2**31, 3, 4], 2) == [], "no token of any model"
    text = "abcd" * 8
    assert len(prompt_hashes(text, 2)) == 4
    assert not set(prompt_hashes(text, 2)) & set(prompt_hashes(list(text.encode()), 8))


def test_the_coordinator_does_without_torch() -> None:
    code = "import sys, megatron_async.serving.coordinator; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_policies_that_do_not_look_at_prompts() -> None:
    prompt = prompt_hashes(list(range(64)), 8)
    a, b, c = candidate("a", tokens=50), candidate("b", tokens=60), candidate("c", tokens=70)
    c.prefix.add(prompt)
    assert POLICIES["prefix"]().choose([a, b, c], prompt, 8) == (c, 8)
    assert POLICIES["least-loaded"]().choose([a, b, c], prompt, 8) == (a, 0)
    full = candidate("full", tokens=1, free=7)
    assert POLICIES["least-loaded"]().choose([full, b, c], prompt, 8) == (b, 0)
    robin = POLICIES["round-robin"]()
    names = [robin.choose([a, b, c], prompt, 8)[0].name for _ in range(5)]
    names += [robin.choose([a, b], prompt, 8)[0].name, robin.choose([c, a, b], prompt, 8)[0].name]
    assert names == ["a", "b", "c", "a", "b", "a", "c"]
    assert robin.choose([c], prompt, 8) == (c, 8)


def test_least_loaded_and_then_who_has_room() -> None:
    a, b = candidate("a", tokens=500), candidate("b", tokens=400)
    assert POLICY.choose([a, b], [], 1) == (b, 0)
    full = candidate("b", tokens=400, free=3)
    assert POLICY.choose([a, full], [], 4) == (a, 0)
    busy = candidate("c", tokens=500, requests=3)
    assert POLICY.choose([busy, a], [], 1)[0] is a


def test_a_shared_prefix_attracts_unless_the_load_is_far_above() -> None:
    prompt = prompt_hashes(list(range(64)), 8)
    idle, near = candidate("idle"), candidate("near", tokens=100)
    near.prefix.add(prompt)
    assert POLICY.choose([idle, near], prompt, 8) == (near, 8)
    far = Candidate("far", 101, 99, 1, near.prefix)
    assert POLICY.choose([idle, far], prompt, 8) == (idle, 0)
    loaded, far = candidate("loaded", tokens=2000), Candidate("far", 2500, 99, 1, near.prefix)
    assert POLICY.choose([loaded, far], prompt, 8) == (far, 8)
    # The longest prefix wins over the lighter load.
    part = candidate("part", tokens=5)
    part.prefix.add(prompt[:3])
    assert POLICY.choose([part, near], prompt, 8) == (near, 8)
    assert POLICY.choose([part, idle], prompt, 8) == (part, 3)


def test_the_table_is_bounded_and_keeps_beginnings() -> None:
    table = PrefixTable(10)
    first, second = prompt_hashes(list(range(0, 60)), 8), prompt_hashes(list(range(100, 160)), 8)
    table.add(first)
    table.add(second)
    assert len(table) == 10
    assert table.match(second) == 7
    assert table.match(first) == 3
    assert table.match(prompt_hashes([5] * 60, 8)) == 0


def test_matches_are_those_of_a_walk_however_little_is_kept() -> None:
    random = np.random.default_rng(3)
    table, latest = PrefixTable(40), []
    for _ in range(300):
        tokens = [int(random.integers(2)) for _ in range(24)]
        prompt = prompt_hashes(tokens[: int(random.integers(25))], 2)
        walked = 0
        while walked < len(prompt) and prompt[walked] in latest:
            walked += 1
        assert table.match(prompt) == walked
        table.add(prompt)
        latest = [each for each in latest if each not in prompt] + prompt[::-1]
        latest = latest[-40:]


def test_simulated_conversations_stay_together_and_load_is_even() -> None:
    """Conversations that grow, on four replicas that work at equal speed."""
    random = np.random.default_rng(1)
    tables = [PrefixTable(4000) for _ in range(4)]
    load = np.zeros(4)
    prompts = [list(random.integers(1000, size=40)) for _ in range(40)]
    policy = RoutingPolicy(slack_tokens=2000)
    matched = total = 0
    highest = 0.0
    for turn in range(1200):
        who = turn if turn < 40 else int(random.integers(40))
        prompts[who] = (prompts[who] + list(random.integers(1000, size=16)))[:400]
        hashes = prompt_hashes([int(token) for token in prompts[who]], 16)
        now = [Candidate(str(i), int(load[i]), 999, 0, tables[i]) for i in range(4)]
        chosen, match = policy.choose(now, hashes, 30)
        tables[int(chosen.name)].add(hashes)
        load[int(chosen.name)] += 16 * (len(hashes) - match) + 64
        load = np.maximum(load - 30, 0)
        matched, total = matched + match, total + len(hashes)
        highest = max(highest, float(load.max() - load.min()))
    assert matched / total > 0.8
    assert highest < 2000 + 500
