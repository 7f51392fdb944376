"""A service is dead when none of its replicas comes again, and not before."""

from __future__ import annotations

from typing import Any

from megatron_async.server.supervisor.serve_settings import ServeSettings
from megatron_async.server.supervisor.service import MOST_EARLY_DEATHS, Supervisor


class Replica:
    """A process that has been ready once, and ends when it is told to."""

    def __init__(self, name: str) -> None:
        self.name, self.was_ready, self.is_alive, self.due = name, True, True, None
        self.deaths, self.ends = 0, False

    def reap(self) -> int | None:
        ends, self.ends = self.ends, False
        return 1 if ends else None

    def start_later(self) -> float:
        return 0.5


class Coordinator:
    """Says who has joined, and hears whether there is hope."""

    is_alive = True

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.told: list[bool] = []

    def ready_replicas(self) -> set[str]:
        return self.there

    def give_up(self, has_no_hope: bool) -> None:
        self.told.append(has_no_hope)


def test_five_vain_starts_of_each_replica_in_a_row() -> None:
    supervisor: Any = Supervisor(ServeSettings(model="dummy:tiny", replicas=2), lambda _: None)
    first, second = Replica("replica-0"), Replica("replica-1")
    supervisor._coordinator = coordinator = Coordinator()
    supervisor._replicas, supervisor._is_announced = [first, second], True

    def has_no_hope(*dying: Replica) -> bool:
        for replica in dying:
            replica.ends = True
        supervisor._turn()
        return coordinator.told[-1]

    for _ in range(MOST_EARLY_DEATHS + 2):
        assert not has_no_hope(first)  # the other one serves
    for _ in range(MOST_EARLY_DEATHS - 1):
        assert not has_no_hope(second)
    assert has_no_hope(second)
    assert has_no_hope()
    coordinator.there = {"replica-1"}  # it came after all
    assert not has_no_hope()
    coordinator.there = set()
    assert not has_no_hope(second)
