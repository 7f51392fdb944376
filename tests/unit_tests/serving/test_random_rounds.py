"""Random schedules of updates: replicas join, die, fail and come late, senders fall silent. No
request goes to weights that are not the service's, every question is answered once, and a replica
is stale exactly while it lacks the service's weights."""

import random
from collections import deque
from typing import Any

import pytest

from megatron_async.serving.messages import Answer, Ask, Do, Done, Run, Weights
from tests.unit_tests.serving.told_service import Service

KEY = "key"


class _Replica:
    """A replica that does what it is told, later, or cannot."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.inbox: deque[Do] = deque()
        self.in_place = self.has_loaded = False

    def do(self, do: Do, fails: bool) -> Done:
        failed = Done(do.number, failure=("UpdateError", "by chance"))
        match do.what.removeprefix("weights_"):
            case "begin":
                self.in_place, self.has_loaded = do.fields["staging"] == "none", False
            case "load":
                self.has_loaded = True
            case "commit" if not fails:
                told = do.fields["weights"]
                self.weights = Weights(told["number"], told.get("version"))
            case "drop":
                is_torn = self.weights.is_torn or (self.in_place and self.has_loaded)
                self.weights = Weights(self.weights.number, self.weights.version, is_torn=is_torn)
                return Done(do.number, {"is_torn": is_torn})
        return failed if fails else Done(do.number)


class _Schedule:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.service = Service(no_replica_timeout_s=1000.0)
        self.rounds = self.service.dispatcher.verbs.weights
        self.there: dict[str, _Replica] = {}
        self.asked: set[int] = set()
        self.count = 0

    def join(self) -> None:
        name, self.count = f"r{self.count}", self.count + 1
        highest = self.rounds.wanted.number
        kept = Weights(self.chance.choice([0, 0, highest]))
        self.there[name] = _Replica(kept)
        self.service.join(name, kept, slots=1000)

    def ask(self, what: str, **fields: Any) -> None:
        self.count += 1
        self.asked.add(self.count)
        self.service.hear("client", Ask(self.count, f"weights_{what}", fields=fields))

    def deliver(self) -> None:
        """Check what was sent, and put it into the inboxes."""
        wanted = self.rounds.wanted.number
        for name in list(self.there):
            for message in self.service.take(name):
                if isinstance(message, Do):
                    self.there[name].inbox.append(message)
                elif isinstance(message, Run):
                    weights = self.there[name].weights
                    round = self.rounds._round
                    allowed = {wanted}
                    if round is not None and round.stage == "commits":
                        allowed.add(round.weights.number)
                    assert weights.number in allowed
                    assert not weights.is_torn
        for message in self.service.take("client"):
            if isinstance(message, Answer):
                self.asked.remove(message.number)

    def step(self, calm: bool = False) -> None:
        chance, busy = self.chance, [n for n, each in self.there.items() if each.inbox]
        event = "does" if calm else chance.choice(
            ["does"] * 8 + ["begin", "load", "load", "finish", "drop", "join", "die", "wait", "run"]
        )  # fmt: skip
        match event:
            case "does" if busy:
                name = chance.choice(busy)
                replica = self.there[name]
                do = replica.inbox.popleft()
                may_fail = not calm and do.what != "weights_drop"
                self.service.hear(name, replica.do(do, may_fail and chance.random() < 0.08))
            case "begin":
                self.ask(
                    "begin", round=KEY, version=self.count, time_limit_s=10.0,
                    way=chance.choice(["together", "rolling"]), partial=chance.random() < 0.2,
                    staging=chance.choice(["auto", "auto", "none"]),
                )  # fmt: skip
            case "load" if chance.random() < 0.5:
                self.ask("load", round=KEY, folder="f")
            case "load":
                self.ask("load", round=KEY, tensors=[["w", "F32", [1], b"1234"]])
            case "finish" | "drop" if event == "finish" or chance.random() < 0.3:
                self.ask(event, round=KEY)
            case "join" if len(self.there) < 4:
                self.join()
            case "die" if self.there and chance.random() < 0.4:
                name = chance.choice(list(self.there))
                del self.there[name]
                self.service.lose(name)
            case "wait":
                self.service.wait(chance.choice([1, 5]), alive=" ".join(["client", *self.there]))
            case "run":
                self.count += 1
                self.service.ask(self.count)
        self.deliver()


@pytest.mark.parametrize("seed", range(40))
def test_random_rounds(seed: int) -> None:
    schedule = _Schedule(seed)
    for _ in range(2):
        schedule.join()
    for _ in range(150):
        schedule.step()
    # The sender is dead; what replicas have yet to do, they do.
    for _ in range(4):
        while any(each.inbox for each in schedule.there.values()):
            schedule.step(calm=True)
        schedule.service.wait(11, alive=" ".join(["client", *schedule.there]))
        schedule.deliver()
    while any(each.inbox for each in schedule.there.values()):
        schedule.step(calm=True)
    assert schedule.rounds._round is None
    assert schedule.asked == set()
    wanted = schedule.rounds.wanted
    for record in schedule.service.dispatcher.replicas.values():
        weights = schedule.there[record.name].weights
        has_them = weights.number == wanted.number and not weights.is_torn
        assert record.is_stale == (not has_them), record.name
