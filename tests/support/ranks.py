"""Run a function on several ranks, each a process of its own, as torchrun would start them.

Ranks are forked from a server that has imported torch and Megatron once, so that starting eight of
them takes a fraction of a second instead of eight times four.
"""

import atexit
import multiprocessing
import os
import pickle
import queue
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from tests.support.patience import PATIENCE_S

# Some module initialises CUDA when it is imported, and a process that has cannot be forked.
_context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
_context.set_forkserver_preload(["tests.support.rank_imports"])
WORKERS = 64
"""Workers of pytest on one machine, at most, whose ports differ."""


@dataclass
class RankError(AssertionError):
    """A rank raised, died, or did not end in time."""

    rank: int
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}"


@dataclass
class RankOutcome:
    """How a rank ended: what its function returned, the traceback of what it raised or "", the
    process's exit code (None: killed when time was up), and seconds from the start of all ranks to
    its end."""

    value: Any = None
    error: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


class Ranks:
    """Ranks that are running (`run_ranks` is the simple way): each calls a top-level function of an
    importable module with `args`, which are pickled."""

    def __init__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.world_size = world_size
        self._results: Any = _context.Queue()
        self._heard: set[int] = set()
        port = str(free_port())
        call = pickle.dumps((function, args))
        self.processes = []
        _start_server()
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            }
            process = _context.Process(
                target=_run, args=(rank, call, variables, self._results), daemon=True
            )
            process.start()
            self.processes.append(process)
        # The first start imports torch for all, which takes seconds on a busy machine.
        self._start = time.monotonic()

    def kill(self, rank: int) -> None:
        """SIGKILL, as `kill -9` would."""
        self.processes[rank].kill()

    def join(self, timeout_s: float = 60.0) -> list[RankOutcome]:
        """Wait until all have ended, one outcome for each; a rank which has not after `timeout_s`
        is killed."""
        outcomes = [RankOutcome() for _ in self.processes]
        running = set(range(self.world_size))
        deadline = self._start + timeout_s
        while running and time.monotonic() < deadline:
            self._collect(outcomes, 0.01)
            for rank in sorted(running):
                code = self.processes[rank].exitcode
                if code is not None:
                    outcomes[rank].exit_code = code
                    outcomes[rank].seconds = time.monotonic() - self._start
                    running.discard(rank)
        for rank in running:
            self.processes[rank].kill()
            outcomes[rank].error = outcomes[rank].error or f"did not end within {timeout_s} s"
        # A rank that ended well has sent a result before: it is on its way, or was read above.
        self._collect(outcomes, 0.0)
        ended_well = {rank for rank, outcome in enumerate(outcomes) if outcome.exit_code == 0}
        while ended_well - self._heard and time.monotonic() < deadline + 1.0:
            self._collect(outcomes, 0.01)
        for process in self.processes:
            process.join(PATIENCE_S)
        return outcomes

    def _collect(self, outcomes: list[RankOutcome], wait_s: float) -> None:
        try:
            while True:
                rank, value, error = self._results.get(timeout=wait_s)
                outcomes[rank].value, outcomes[rank].error = value, error
                self._heard.add(rank)
        except queue.Empty:
            return


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """What `function(*args)` returned, by rank; it finds RANK and WORLD_SIZE in the environment. A
    RankError if a rank raised (with its traceback), died, or did not end within `timeout_s`."""
    outcomes = Ranks(world_size, function, *args, environment=environment).join(timeout_s)
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            raise RankError(rank, outcome.error)
    for rank, outcome in enumerate(outcomes):
        if outcome.exit_code != 0:
            raise RankError(rank, f"exit code {outcome.exit_code}")
    return [outcome.value for outcome in outcomes]


def quick_context() -> Any:
    """Multiprocessing whose processes are forked from the same server, for what starts processes
    that import torch, each for itself, otherwise."""
    _start_server()
    return _context


def free_port() -> int:
    """A TCP port of this host that nobody uses at the moment, below those that the system gives to
    connections: one of these might take it before it is used. For the same reason each worker of
    pytest has ports of its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        port = random.randrange(15000 + worker % WORKERS, 32000, WORKERS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _start_server() -> None:
    """Start the server that ranks are forked from, unless it runs. Python 3.12's looks for the
    modules that it imports first in PYTHONPATH, not where this process looks."""
    if _context.get_start_method() != "forkserver":
        return
    path = os.environ.get("PYTHONPATH")
    here = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = here if path is None else f"{here}{os.pathsep}{path}"
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


def _run(rank: int, call: bytes, variables: dict[str, str], results: Any) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    value, error = None, ""
    try:
        function, args = pickle.loads(call)
        value = function(*args)
    except BaseException as raised:
        error = traceback.format_exc()
        sys.last_exc = raised
    results.put((rank, value, error))
    results.close()
    results.join_thread()  # or the result could be lost with the process
    # As the interpreter does at the end of a process, but not of one of multiprocessing.
    atexit._run_exitfuncs()
