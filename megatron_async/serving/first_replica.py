"""`FirstReplica`: let a client's requests wait until there is a replica."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_async.errors import ReplicaLost

logger = logging.getLogger("megatron_async")

ASK_EVERY_S = 0.2
"""Seconds between two questions to a coordinator that has no replica yet."""
LEAVING = ("leaving", "helping")
"""States of replicas that serve no further request (`records.ReplicaState`, which clients do not
import)."""


class FirstReplica:
    """Waits for a coordinator's first replica, which may still load its model.

    Once there has been a replica, the coordinator itself keeps requests without a replica, for up
    to its `no_replica_timeout_s`.

    Args:
        address: of the coordinator, for messages.
        timeout_s: how long to wait.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._asking = asyncio.Lock()
        self.forget()

    def forget(self) -> None:
        """The coordinator is lost; the next one at its address may have no replica yet."""
        self._has_come = self._has_told = False

    async def wait(self, stats: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """Wait until there is a replica; return at once if there was one before.

        Args:
            stats: asks the coordinator.

        Raises:
            ReplicaLost: none came in time.
        """
        start = time.monotonic()
        async with self._asking:  # one asks for all who wait
            while not self._has_come:
                replicas = (await stats())["replicas"].values()
                self._has_come = any(replica["state"] not in LEAVING for replica in replicas)
                if self._has_come:
                    break
                if time.monotonic() - start >= self._timeout_s:
                    raise ReplicaLost(
                        f"the coordinator at {self._address} has no replica, and none came within "
                        f"{self._timeout_s:g} s: start one with `megatron-async replica MODEL "
                        f"--coordinator {self._address}`, or raise replica_timeout_s if one is "
                        "loading its model."
                    )
                self._tell()
                await asyncio.sleep(min(ASK_EVERY_S, self._timeout_s))

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "The coordinator at %s has no replica yet: waiting up to %g s for one to load its "
                "model (`megatron-async replica MODEL` starts one).",
                self._address, self._timeout_s,
            )  # fmt: skip
