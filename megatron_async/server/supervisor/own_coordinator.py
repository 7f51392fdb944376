"""The coordinator of a service, in a thread of its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

from megatron_async.errors import ConfigurationError, CoordinatorLost
from megatron_async.observe.log_lines import COORDINATOR
from megatron_async.serving.async_client import AsyncCoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.records import CoordinatorConfig

logger = logging.getLogger("megatron_async")

PREFIX = "megatron-async-"
"""Prefix of folders' names, followed by the number of the supervisor's process."""
LONGEST_SOCKET_PATH = 100
"""Bytes: a Unix socket's address has 108, the last one 0."""
ASK_TIMEOUT_S = 5.0


class OwnCoordinator:
    """A coordinator that only processes of this user reach: its socket lies in a folder of mode
    0700, which is removed at the end. A context manager.

    Args:
        config: limits and policies.

    Attributes:
        folder: for what else must not be seen by other users.
        address: where replicas and clients find it.

    Raises:
        ConfigurationError: the folder for temporary files cannot be written, or has so long a name
            that no socket can lie in it.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        try:
            remove_left_folders(Path(tempfile.gettempdir()))
            self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))  # mode 0700
        except OSError as error:
            raise ConfigurationError(
                f"the service has no folder for its sockets ({error}): set TMPDIR to one that can "
                "be written."
            ) from error
        socket = self.folder / "coordinator"
        try:
            if len(bytes(socket)) > LONGEST_SOCKET_PATH:
                raise ConfigurationError(
                    f"{socket}: no socket can have so long a name: set TMPDIR to a shorter folder."
                )
            self._coordinator = Coordinator(f"ipc://{socket}", config)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
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
        """Let it end all requests, each client told; whether it does, as `drain`."""
        return self._tell("abort", all=True)

    def _tell(self, what: str, **fields: Any) -> bool:
        try:
            asyncio.run(_ask(self.address, what, fields))
        except (CoordinatorLost, TimeoutError, ValueError) as error:
            logger.warning("The coordinator cannot be told to %s: %s", what, error)
            return False
        return True

    def close(self) -> None:
        """End it; those who are connected see that."""
        self._coordinator.stop()
        self._thread.join(5.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        try:
            self._coordinator.run()
        except Exception:
            logger.exception("The coordinator has failed")

    def __enter__(self) -> OwnCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_left_folders(parent: Path) -> None:
    """Remove this user's folders of services that were killed and could not do it.

    Args:
        parent: where they lie.
    """
    for folder in parent.glob(f"{PREFIX}*-*"):
        process = folder.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            is_ours = process.isdigit() and folder.lstat().st_uid == os.getuid()
            if is_ours and not psutil.pid_exists(int(process)):
                shutil.rmtree(folder)  # raises for a link


async def _ask(address: str, what: str, fields: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(ASK_TIMEOUT_S):
        client = AsyncCoordinatorClient(address, ASK_TIMEOUT_S)
        async with client:
            return await client.ask(what, **fields)
