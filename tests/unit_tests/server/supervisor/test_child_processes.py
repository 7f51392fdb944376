"""Children of the supervisor: their starts, their ends within `--shutdown-timeout`, and the
coordinator among them."""

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.server.supervisor import service
from megatron_async.server.supervisor.own_coordinator import OwnCoordinator
from megatron_async.server.supervisor.processes import (
    LONGEST_DELAY_S,
    ChildProcess,
    restart_delay_s,
    why_ended,
)
from megatron_async.server.supervisor.serve_settings import ServeSettings
from megatron_async.server.supervisor.service import MOST_EARLY_DEATHS, Supervisor
from megatron_async.serving.async_client import AsyncCoordinatorClient
from megatron_async.serving.records import CoordinatorConfig
from tests.support.patience import PATIENCE_S, eventually

PARENT = """
import os, time
from megatron_async.server.supervisor.processes import ChildProcess
pipe, held = os.pipe()
# A command that needs no torch and runs until it is ended.
child = ChildProcess("child", ("coordinator", "--bind", "tcp://127.0.0.1:*"), pipe)
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""
IN_FRONT = """
import os, sys, time
from megatron_async.server.supervisor import child
child.PR_SET_PDEATHSIG = 0  # not understood by the kernel: the pipe alone is left
child.end_with_parent(os.getppid(), int(sys.argv[1]))
print("bound", flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_does_not_outlive_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline().startswith(b"coordinator at")  # the child is at work
        parent.kill()
        try:
            eventually(lambda: not is_alive(pid), "the child to end")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_pipe_tells_of_the_end_too() -> None:
    pipe, held = os.pipe()
    command = [sys.executable, "-c", IN_FRONT, str(pipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[pipe]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"bound\n"
        assert child.poll() is None
        os.close(held)
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
    os.close(pipe)


def test_a_child_whose_parent_is_another_ends_at_once() -> None:
    pipe, held = os.pipe()
    command = [sys.executable, "-m", "megatron_async.server.supervisor.child", "1", str(pipe), "15"]
    done = subprocess.run([*command, "replicas"], pass_fds=[pipe], check=False, timeout=PATIENCE_S)
    assert done.returncode == -signal.SIGTERM
    os.close(pipe)
    os.close(held)


def test_deaths_in_a_row_take_longer_and_longer() -> None:
    delays = [restart_delay_s(deaths) for deaths in range(1, 50)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays == sorted(delays)
    assert delays[-1] == LONGEST_DELAY_S


def test_a_child_is_reaped_once_and_started_again() -> None:
    pipe, held = os.pipe()
    child = ChildProcess("child", ("no-such-command",), pipe)
    for deaths in (1, 2):
        child.start()
        status: list[int] = []

        def has_ended(found: list[int] = status) -> bool:
            if (code := child.reap()) is not None:
                found.append(code)
            return bool(found)

        eventually(has_ended, "the end")
        assert status == [2]
        assert child.reap() is None
        assert child.pid is None
        assert child.deaths == deaths
        assert child.start_later() == restart_delay_s(deaths)
        assert child.due is not None
    child.signal(signal.SIGTERM)  # a service that ends starts nobody
    assert child.due is None
    os.close(pipe)
    os.close(held)


def test_ends_in_words() -> None:
    assert why_ended(2) == "it ended with status 2"
    assert why_ended(-9) == "it was ended by SIGKILL"
    assert why_ended(-99) == "it was ended by signal 99"


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
    """Says which replicas have joined, and hears whether there is hope."""

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
def test_all_ends_within_the_limit(limit_s: float, done_s: float, slow_s: float, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(service.time, "monotonic", lambda: clock.now)
    settings = ServeSettings(model="dummy:tiny", shutdown_timeout_s=limit_s)
    supervisor: Any = Supervisor(settings, lambda _: None)
    supervisor._coordinator = coordinator = Drained(clock, done_s)
    front, replica = Child("api", clock, slow_s), Child("replica", clock, slow_s)
    supervisor._fronts, supervisor._replicas = [front], [replica]
    assert supervisor._leave(clock) == 0
    assert clock.now <= max(limit_s, 2.0) + 1e-6
    # Requests have more than half of the time; a client of a longer one is told, then it ends.
    is_in_time = done_s < limit_s / 2
    assert (coordinator.aborted_at is None) == is_in_time
    if not is_in_time:
        assert coordinator.aborted_at >= limit_s / 2 - 2.0
    assert front.told[0][0] == signal.SIGTERM
    assert signal.SIGKILL in dict(replica.told) or not replica.is_alive
    assert replica.told[0][1] >= front.told[0][1]


def test_without_a_coordinator_api_processes_have_all_of_it(monkeypatch):
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


CONFIG = CoordinatorConfig(ping_interval_s=0.05)


def test_others_of_this_host_do_not_reach_it() -> None:
    with OwnCoordinator(CONFIG) as coordinator:
        folder = coordinator.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert coordinator.address == f"ipc://{folder}/coordinator"
        assert coordinator.is_alive
        assert coordinator.ready_replicas() == set()
    assert not folder.exists()
    assert not coordinator.is_alive


def test_it_drains_and_says_so() -> None:
    with OwnCoordinator(CONFIG) as coordinator:
        assert coordinator.drain()
        eventually(lambda: coordinator.stats["state"] == "draining")
        assert coordinator.stats["unfinished_requests"] == 0

        async def health() -> dict[str, object]:
            async with AsyncCoordinatorClient(coordinator.address) as client:
                return await client.ask("health")

        assert asyncio.run(health()) == {"state": "draining", "replicas": 0}


def test_a_folder_of_too_long_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigurationError, match="TMPDIR"):
        OwnCoordinator(CONFIG)
    assert not list(deep.iterdir())


def test_a_folder_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="set TMPDIR"):
        OwnCoordinator(CONFIG)
