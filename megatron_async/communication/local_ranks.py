"""`LocalRanks`: starts the ranks of a job of this host, as torchrun does, but without a port.

torchrun keeps a store for its ranks that listens at all addresses without authentication;
what it reads there about its own rendezvous it unpickles (torch 2.11,
`distributed/elastic/rendezvous/dynamic_rendezvous.py`). Here the ranks meet in a folder that no
other user reaches. This module needs no torch.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_async.communication.own_folder import FOLDER_VARIABLE
from megatron_async.errors import ConfigurationError

END_S = 30.0
"""Seconds that ranks have to end, once one has failed or a signal has come; as with torchrun."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNAL = -1
"""Stands for a rank in an event: a signal has come."""


@dataclass(frozen=True)
class RankEnd:
    """The end of the rank that failed first.

    Attributes:
        rank: which.
        pid: its process.
        code: its exit status, or minus a signal's number.
    """

    rank: int
    pid: int
    code: int

    @property
    def status(self) -> int:
        """Exit status as a shell gives it: 128 + N for signal N."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        how = f"status {self.code}" if self.code >= 0 else signal.Signals(-self.code).name
        return f"rank {self.rank} (pid {self.pid}) ended with {how}"


class LocalRanks:
    """Processes that run the same command, each a session of its own and a rank of one job.

    Args:
        command: program and arguments.
        count: of ranks.
        folder: of this user alone, and new for each start: ranks find each other by files in it.
        logs: a folder; each rank's output goes to files there, too: `rank0.stdout.log` ...
    """

    def __init__(
        self, command: Sequence[str], count: int, folder: Path, logs: Path | None = None
    ) -> None:
        self._command = command
        self._folder = folder
        self._logs = logs
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: set[int] = set()
        self._copies: list[threading.Thread] = []
        self._events: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def run(self) -> RankEnd | None:
        """Start the ranks, and wait until all have ended. From the main thread alone.

        When one rank fails, the others get SIGTERM. SIGTERM, SIGINT and SIGHUP go on to all ranks.
        Those that are still there `END_S` later are killed.

        Returns:
            the rank that failed first; None: all ended with status 0.

        Raises:
            ConfigurationError: the command cannot be started, or the logs cannot be written.
        """
        with ExitStack() as stack:
            for number in FORWARDED:
                before = signal.signal(number, lambda got, _: self._events.put((SIGNAL, got)))
                stack.callback(signal.signal, number, before)
            stack.callback(self._end)
            try:
                self._start()
            except OSError as error:
                raise ConfigurationError(
                    f"{self._command[0]} cannot be run on {self._count} ranks ({error}): check the "
                    "command and the folder for logs."
                ) from error
            return self._wait()

    def _start(self) -> None:
        address, port = _free_place()
        shared = {
            "WORLD_SIZE": str(self._count),
            "LOCAL_WORLD_SIZE": str(self._count),
            FOLDER_VARIABLE: str(self._folder),
            # For programs that make torch's groups themselves; this project's need no port.
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        # Not torch's own choice, all cores for each rank.
        threads = max(1, (os.cpu_count() or 1) // self._count)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        for rank in range(self._count):
            environment = {
                "OMP_NUM_THREADS": str(threads),
                **inherited, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank),
            }  # fmt: skip
            self._start_rank(rank, environment)
        for rank, process in enumerate(self._processes):
            threading.Thread(target=self._await, args=(rank, process), daemon=True).start()

    def _start_rank(self, rank: int, environment: Mapping[str, str]) -> None:
        output = None if self._logs is None else subprocess.PIPE
        process = subprocess.Popen(
            self._command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        self._processes.append(process)
        self._running.add(rank)
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            for name, pipe, shown in (
                ("stdout", process.stdout, sys.stdout.buffer),
                ("stderr", process.stderr, sys.stderr.buffer),
            ):
                assert pipe is not None
                file = (self._logs / f"rank{rank}.{name}.log").open("wb", buffering=0)
                copy = threading.Thread(target=_copy, args=(pipe, shown, file), daemon=True)
                copy.start()
                self._copies.append(copy)

    def _await(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._events.put((rank, process.wait()))

    def _wait(self) -> RankEnd | None:
        first: RankEnd | None = None
        deadline: float | None = None
        while self._running:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                source, value = self._events.get(timeout=left_s)
            except queue.Empty:
                self._signal(signal.SIGKILL)
                deadline = None
                continue
            if source == SIGNAL:
                self._signal(value)
            else:
                self._running.discard(source)
                if value == 0 or first is not None:
                    continue
                first = RankEnd(source, self._processes[source].pid, value)
                self._signal(signal.SIGTERM)
            deadline = deadline or time.monotonic() + END_S
        return first

    def _signal(self, number: int) -> None:
        for rank in self._running:
            with suppress(ProcessLookupError):
                os.killpg(self._processes[rank].pid, number)

    def _end(self) -> None:
        self._signal(signal.SIGKILL)
        for copy in self._copies:
            copy.join(1.0)  # a rank's own children may hold its output open


def _copy(pipe: IO[bytes], shown: IO[bytes], file: IO[bytes]) -> None:
    with pipe, file:
        for line in pipe:
            for target in (file, shown):
                with suppress(OSError, ValueError):  # a full disk, or nobody reads any more
                    target.write(line)
                    target.flush()


def _free_place() -> tuple[str, str]:
    """A loopback address of this host and a free port there; hosts may have IPv6 alone."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address, str(probe.getsockname()[1])
    raise ConfigurationError("this host has no loopback address: `ip link set lo up`.")
