"""Ray's settings: ours where the user has set none."""

from __future__ import annotations

import os

import pytest

from megatron_async.ray.environment import (
    CLUSTER,
    PROCESSES,
    process_environment,
    set_for_cluster,
)


def test_what_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CLUSTER, *PROCESSES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_SERVE_USE_GRPC_BY_DEFAULT", "0")
    monkeypatch.setenv("RAY_worker_niceness", "7")
    assert process_environment() == {**PROCESSES, "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0"}
    for name in CLUSTER:  # so that the test's end takes them back
        monkeypatch.setenv(name, os.environ.get(name, "none"))
        if os.environ[name] == "none":
            del os.environ[name]
    set_for_cluster()
    assert {name: os.environ[name] for name in CLUSTER} == {**CLUSTER, "RAY_worker_niceness": "7"}
