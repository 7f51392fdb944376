"""The coordinator of a service, in a thread of its supervisor."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

from megatron_async.communication.own_folder import OwnFolder
from megatron_async.errors import ConfigurationError, CoordinatorLost
from megatron_async.observe.log_lines import COORDINATOR
from megatron_async.serving.async_client import AsyncCoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.records import CoordinatorConfig

logger = logging.getLogger("megatron_async")

LONGEST_SOCKET_PATH = 100
"""Bytes: a Unix socket's address has 108, the last one 0."""
ASK_TIMEOUT_S = 5.0


class OwnCoordinator:
    """A coordinator that only processes of this user reach: its socket lies in a folder of its
    own, which is removed at the end. A context manager.

    Attributes:
        folder: for what else must not be seen by other users.
        address: where replicas and clients find it.

    Raises:
        ConfigurationError: the folder for temporary files cannot be written, or has so long a name
            that no socket can lie in it.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._own = OwnFolder()
        self.folder = self._own.path
        socket = self.folder / "coordinator"
        try:
            if len(bytes(socket)) > LONGEST_SOCKET_PATH:
                raise ConfigurationError(
                    f"{socket}: no socket can have so long a name: set TMPDIR to a shorter folder."
                )
            self._coordinator = Coordinator(f"ipc://{socket}", config)
        except BaseException:
            self._own.close()
            raise
        self.address = self._coordinator.address
        self._thread = threading.Thread(target=self._run, name=COORDINATOR, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it serves; an error of its own has ended it otherwise, and is logged."""
        return self._thread.is_alive()

    @property
    def stats(self) -> dict[str, Any]:
        """The coordinator's last statistics, at most half a second old."""
        return self._coordinator.latest_stats

    def ready_replicas(self) -> set[str]:
        """Names of the replicas that have loaded their model and joined."""
        return set(self.stats["replicas"])

    def give_up(self, has_no_hope: bool) -> None:
        """Tell it whether its lost replicas will not come again, so that `/health` says so."""
        self._coordinator.dispatcher.verbs.is_given_up = has_no_hope

    def drain(self) -> bool:
        """Let it refuse further requests; whether it does. Takes some seconds at most."""
        return self._tell("drain")

    def abort_all(self) -> bool:
        """Let it end all requests with an error to each client; whether it does, as `drain`."""
        return self._tell("abort", all=True)

    def _tell(self, what: str, **fields: Any) -> bool:
        async def ask() -> None:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                async with AsyncCoordinatorClient(self.address, ASK_TIMEOUT_S) as client:
                    await client.ask(what, **fields)

        try:
            asyncio.run(ask())
        except (CoordinatorLost, TimeoutError, ValueError) as error:
            logger.warning("The coordinator cannot be told to %s: %s", what, error)
            return False
        return True

    def close(self) -> None:
        """End the coordinator; connected peers notice it."""
        self._coordinator.stop()
        self._thread.join(5.0)
        self._own.close()

    def _run(self) -> None:
        try:
            self._coordinator.run()
        except Exception:
            logger.exception("The coordinator has failed")

    def __enter__(self) -> OwnCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
