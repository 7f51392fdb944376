"""`StoppedProcesses`: which processes of this host someone has stopped, and not let go on."""

from __future__ import annotations

import time
from collections.abc import Mapping

from megatron_async.communication.host import process_state

LOOKS_IN_SILENCE = 4
"""Looks within the time after which a stopped process counts as lost."""


class StoppedProcesses:
    """Looks at the states of processes, now and then.

    A debugger or SIGSTOP stops a process; its connections stay open, so nothing else tells.

    Args:
        silence_s: a process that was stopped for so long is lost.

    Attributes:
        interval_s: between two looks.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self.interval_s = silence_s / LOOKS_IN_SILENCE
        self._next_look = 0.0
        self._since: dict[int, float] = {}

    def look(self, pids: Mapping[int, int]) -> list[int]:
        """Look, if it is time.

        Args:
            pids: rank -> id of a process of this host.

        Returns:
            ranks that every look found stopped, for about `silence_s`.
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
