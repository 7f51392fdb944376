"""The coordinator of a service: who reaches it, what it tells, and its end."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.server.supervisor.own_coordinator import OwnCoordinator
from megatron_async.serving.async_client import AsyncCoordinatorClient
from megatron_async.serving.records import CoordinatorConfig
from tests.support.patience import eventually

CONFIG = CoordinatorConfig(ping_interval_s=0.05)


def test_others_of_this_host_do_not_reach_it() -> None:
    with OwnCoordinator(CONFIG) as coordinator:
        folder = coordinator.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert coordinator.address == f"ipc://{folder}/coordinator"
        assert coordinator.is_alive
        assert coordinator.ready_replicas() == set()
    assert not folder.exists()
    assert not coordinator.is_alive


def test_it_drains_and_says_so() -> None:
    with OwnCoordinator(CONFIG) as coordinator:
        assert coordinator.drain()
        eventually(lambda: coordinator.stats["state"] == "draining")
        assert coordinator.stats["unfinished_requests"] == 0

        async def health() -> dict[str, object]:
            async with AsyncCoordinatorClient(coordinator.address) as client:
                return await client.ask("health")

        assert asyncio.run(health()) == {"state": "draining", "replicas": 0}


def test_a_folder_of_too_long_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigurationError, match="TMPDIR"):
        OwnCoordinator(CONFIG)
    assert not list(deep.iterdir())


def test_a_folder_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="set TMPDIR"):
        OwnCoordinator(CONFIG)
