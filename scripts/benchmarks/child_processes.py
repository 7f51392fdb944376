"""Processes beside a benchmark: starting them, a coordinator among them, and what they cost."""

import multiprocessing
import os
from multiprocessing.connection import Connection as Pipe
from typing import Any

from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.records import CoordinatorConfig

SPAWN = multiprocessing.get_context("spawn")


def coordinate(pipe: Pipe) -> None:
    """A coordinator's process; tells its address and process id."""
    silence = CoordinatorConfig(
        max_unfinished=100_000, requests_per_slot=1, silence_s=120, client_silence_s=120
    )
    coordinator = Coordinator("ipc:///tmp/emit-" + str(os.getpid()), silence)
    pipe.send((coordinator.address, os.getpid()))
    coordinator.run()


def spawn(target: Any, *args: Any) -> tuple[Any, Pipe]:
    """A process and our end of its pipe."""
    mine, its = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*args, its), daemon=True)
    process.start()
    return process, mine


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has had, all threads (Linux)."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
