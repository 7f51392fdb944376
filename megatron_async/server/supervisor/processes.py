"""`ChildProcess`: a process that is started, ended, and started again, but not too often."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

MODULE = "megatron_async.server.supervisor.child"
FIRST_DELAY_S = 0.5
"""Before a process that has died is started again; twice as long with each further death."""
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""A process that has lived so long has a clean record: its next death is its first."""


class ChildProcess:
    """One child of the supervisor, over all the processes that it becomes. It reads `given` from
    its standard input, and inherits `fds` beside `pipe`.

    Args:
        name: for messages, and of a replica its name.
        arguments: behind `PARENT PIPE SIGNAL` of the child module; the first is what it is.
        pipe: the end of the parent's pipe that children read.
        on_parents_death: the signal that it gets then.

    Attributes:
        deaths: in a row, each sooner than `STEADY_S` after its start.
        was_ready: whether it has ever been ready, as the owner of this object says.
        due: when it is to be started again, on the clock of `time.monotonic`; None: not at all.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        pipe: int,
        fds: Sequence[int] = (),
        given: bytes | None = None,
        environment: Mapping[str, str] | None = None,
        on_parents_death: int = signal.SIGKILL,
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._pipe = pipe
        self._fds = (pipe, *fds)
        self._given = given
        self._environment = environment
        self._signal = int(on_parents_death)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self.deaths = 0
        self.was_ready = False
        self.due: float | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether there is a process that has not been reaped."""
        return self._process is not None

    def start(self) -> None:
        """Start a process.

        From the main thread alone: the kernel takes the end of the thread that started a process
        for the end of its parent.
        """
        assert self._process is None, self.name
        self.due, self._started = None, time.monotonic()
        # In a process group of its own: Ctrl-C is for the supervisor, which ends others in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(os.getpid()), str(self._pipe), str(self._signal),
             *self._arguments],
            stdin=subprocess.DEVNULL if self._given is None else subprocess.PIPE,
            pass_fds=self._fds, process_group=0, env=self._environment,
        )  # fmt: skip
        if self._given is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(self._given)

    def reap(self) -> int | None:
        """The exit status of its process, negative for a signal, once after its end; else None."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        self._process = None
        lived = time.monotonic() - self._started
        self.deaths = 1 if lived >= STEADY_S else self.deaths + 1
        return status

    def start_later(self) -> float:
        """Plan its next start; returns the seconds until then."""
        delay = restart_delay_s(self.deaths)
        self.due = time.monotonic() + delay
        return delay

    def signal(self, number: int) -> None:
        """Send its process a signal, if there is one; a killed job of ranks ends by itself."""
        self.due = None
        if self._process is not None:
            self._process.send_signal(number)


def restart_delay_s(deaths: int) -> float:
    """Seconds before the next start, after so many deaths in a row (1 or more)."""
    return min(FIRST_DELAY_S * 2 ** min(deaths - 1, 16), LONGEST_DELAY_S)


def why_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"
