"""Whatever happens, in whatever order: no request is lost, answered twice or served twice."""

from __future__ import annotations

import random

import pytest

from megatron_async.serving.messages import (
    PROTOCOL,
    Abort,
    Ask,
    ClientHello,
    Generate,
    Goodbye,
    Helping,
    Leave,
    Leaving,
    ReplicaHello,
    Run,
    StepTokens,
)
from megatron_async.serving.records import ReplicaState
from tests.unit_tests.serving.told_service import PARAMS, Service, info, status

STEPS = 120


class RandomService(Service):
    """Two clients and replicas that do anything they may, and some things that they may not.

    Args:
        seed: of what happens.
    """

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
