"""`Wait`: a wait for other ranks with a name and a time limit, which names missing ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from megatron_async.communication.host import list_ranks
from megatron_async.errors import CommunicationTimeout, RankLost

if TYPE_CHECKING:
    from megatron_async.communication.death_watch import DeathWatch

logger = logging.getLogger("megatron_async")

WARN_AFTER_S = 5.0
"""Seconds after which a wait with a time limit is logged, and again when its length doubles."""

SLICE_S = 0.25
"""Longest sleep in seconds: a wait checks for lost ranks at least this often."""

LAST_WORDS_S = 0.5
"""Seconds by which a goodbye may overtake an earlier message on another connection."""


class Wait:
    """The checks between two polls of a wait.

    Args:
        what: name of the wait, as in "waiting for {what}".
        timeout_s: seconds; None waits for ever (a loss still ends it).
        watch: knows which ranks have died or left; None before there is one.
        members: ranks whose loss ends the wait; None: any rank's.
        remedy: advice for the error when time is up.
    """

    def __init__(
        self,
        what: str,
        timeout_s: float | None,
        watch: DeathWatch | None,
        members: Sequence[int] | None = None,
        remedy: str = "",
    ) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._watch = watch
        self._members = members
        self._remedy = remedy
        self._start = time.monotonic()
        self._warn_at = WARN_AFTER_S
        self._gone_since = 0.0

    def seconds_to_sleep(self, missing: Collection[int]) -> float:
        """Seconds to sleep before the next poll; call it after each poll that found nothing.

        Args:
            missing: the ranks that are still waited for.

        Raises:
            RankLost: one of the members is dead, or one that is missing has left.
            CommunicationTimeout: time is up.
        """
        waited = time.monotonic() - self._start
        if self._watch is not None:
            self._watch.check(self._members, f"{self._what} ({waited:.1f} s)")
            gone = [rank for rank in missing if self._watch.has_left(rank)]
            if not gone:
                self._gone_since = waited
            elif waited - self._gone_since > LAST_WORDS_S:
                raise RankLost(
                    f"{self._watch.describe(gone)} left the job in order (its work was done, or "
                    f"it called close()), but is waited for: {self._what} ({waited:.1f} s).",
                    gone,
                )
        if self._timeout_s is not None and waited >= self._timeout_s:
            late = sorted(missing)
            raise CommunicationTimeout(
                f"Waited {waited:.1f} s for {self._what}: {self._describe(late)} did not come. "
                + (self._remedy or "See what it does (py-spy dump --pid), or wait longer."),
                late,
            )
        if waited >= self._warn_at and self._timeout_s is not None:
            self._warn_at = 2 * waited
            logger.warning(
                "Waiting for %s since %.0f s, at most %.0f s: %s missing.",
                self._what,
                waited,
                self._timeout_s,
                self._describe(sorted(missing)),
            )
        left = SLICE_S if self._timeout_s is None else self._timeout_s - waited
        return min(SLICE_S, max(left, 0.0))

    def _describe(self, ranks: Sequence[int]) -> str:
        return list_ranks(ranks) if self._watch is None else self._watch.describe(ranks)
