"""`StoppedProcesses`: processes of this host that were stopped and not continued."""

from __future__ import annotations

import time
from collections.abc import Mapping

from megatron_async.communication.host import process_state

LOOKS_IN_SILENCE = 4
"""Number of checks within the time after which a stopped process counts as lost."""


class StoppedProcesses:
    """Checks the states of processes at intervals.

    A debugger or SIGSTOP stops a process. Its connections stay open, so only its state shows this.

    Args:
        silence_s: seconds after which a stopped process counts as lost.

    Attributes:
        interval_s: seconds between two checks.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self.interval_s = silence_s / LOOKS_IN_SILENCE
        self._next_look = 0.0
        self._since: dict[int, float] = {}

    def look(self, pids: Mapping[int, int]) -> list[int]:
        """Check the processes, if it is time.

        Args:
            pids: rank -> id of a process of this host.

        Returns:
            ranks that all checks of about `silence_s` found stopped.
        """
        now = time.monotonic()
        if now < self._next_look:
            return []
        self._next_look = now + self.interval_s
        stopped = [rank for rank, pid in pids.items() if process_state(pid) == "stopped"]
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        # It may have been stopped just after the look before the first that found it so.
        longest = self._silence_s - self.interval_s
        return [rank for rank in stopped if now - self._since[rank] >= longest]
