"""`--shutdown-timeout` holds for all of an end, on a clock that only the test moves."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from megatron_async.server.supervisor import service
from megatron_async.server.supervisor.serve_settings import ServeSettings
from megatron_async.server.supervisor.service import Supervisor


class Clock:
    """Time, and signals of the supervisor, which sleep by moving it."""

    def __init__(self) -> None:
        self.now, self.leave, self.last = 0.0, 1, signal.SIGTERM

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Child:
    """A process that takes so many seconds to end."""

    def __init__(self, name: str, clock: Clock, lasts_s: float) -> None:
        self.name, self.is_alive, self.told = name, True, []
        self._clock, self._lasts_s, self._ends = clock, lasts_s, float("inf")

    def signal(self, number: int) -> None:
        self.told.append((number, self._clock.now))
        self._ends = 0.0 if number == signal.SIGKILL else self._clock.now + self._lasts_s

    def reap(self) -> None:
        self.is_alive = self.is_alive and self._clock.now < self._ends


class Drained:
    """A coordinator whose last request ends after so many seconds."""

    def __init__(self, clock: Clock, done_s: float) -> None:
        self._clock, self._done_s, self.aborted_at = clock, done_s, None

    def drain(self) -> bool:
        return True

    def abort_all(self) -> None:
        self.aborted_at = self._clock.now

    @property
    def stats(self) -> dict[str, Any]:
        return {"state": "draining", "unfinished_requests": self._clock.now < self._done_s}


@pytest.mark.parametrize("slow_s", [0.5, 1000.0])
@pytest.mark.parametrize("done_s", [1.0, 1000.0])
@pytest.mark.parametrize("limit_s", [0.0, 1.0, 6.0, 30.0, 300.0])
def test_all_ends_within_the_limit(
    limit_s: float, done_s: float, slow_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(service.time, "monotonic", lambda: clock.now)
    settings = ServeSettings(model="dummy:tiny", shutdown_timeout_s=limit_s)
    supervisor: Any = Supervisor(settings, lambda _: None)
    supervisor._coordinator = coordinator = Drained(clock, done_s)
    front, replica = Child("api", clock, slow_s), Child("replica", clock, slow_s)
    supervisor._fronts, supervisor._replicas = [front], [replica]
    assert supervisor._leave(clock) == 0
    assert clock.now <= max(limit_s, 2.0) + 1e-6
    # Requests have more than half of the time; who has more to do is told, then ended.
    is_in_time = done_s < limit_s / 2
    assert (coordinator.aborted_at is None) == is_in_time
    if not is_in_time:
        assert coordinator.aborted_at >= limit_s / 2 - 2.0
    assert front.told[0][0] == signal.SIGTERM
    assert signal.SIGKILL in dict(replica.told) or not replica.is_alive
    assert replica.told[0][1] >= front.told[0][1]


def test_without_a_coordinator_api_processes_have_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(service.time, "monotonic", lambda: clock.now)
    settings = ServeSettings(model=None, coordinator="tcp://10.0.0.5:9500", shutdown_timeout_s=30.0)
    supervisor: Any = Supervisor(settings, lambda _: None)
    front = Child("api", clock, 1000.0)
    supervisor._fronts = [front]
    assert supervisor._leave(clock) == 0
    assert [(number, round(at, 6)) for number, at in front.told] == [
        (signal.SIGTERM, 0.0), (signal.SIGKILL, 29.0),
    ]  # fmt: skip
