"""What a fleet's settings refuse, and what is said where Ray is missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.ray.fleet_settings import FleetSettings
from megatron_async.server.api_config import ApiConfig, KeyDigest

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, ("min_replicas=3", "max_replicas=2")),
        ({"min_replicas": 0}, ("min_replicas=0", "from 1")),
        ({"engine": {"expert_model_parallel_size": 2}}, ("expert_model_parallel_size", "serve")),
        ({"batch_s": 0.001}, ("batch_s=0.001", "0.005")),
        ({"policy": "random"}, ("random", "least-loaded")),
        ({"port": 0}, ("port=0", "1 to 65535")),
        ({"port": 70000}, ("port=70000", "1 to 65535")),
        ({"port": 8000, "host": "0.0.0.0"}, ("0.0.0.0", "keys")),
        ({"port": 8000, "host": "no.such.host.here"}, ("no.such.host.here", "127.0.0.1")),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        FleetSettings(model="m", **fields).check()
    assert all(word in str(error.value) for word in words)


def test_an_exposed_port_has_keys() -> None:
    api = ApiConfig(coordinator="", keys=(KeyDigest("a", "0" * 64),))
    FleetSettings(model="m", port=8000, host="0.0.0.0", api=api).check()
    FleetSettings(model="m", port=8000).check()


def test_a_replica_has_as_many_ranks_as_its_sizes_say() -> None:
    engine = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    settings = FleetSettings(model="m", engine=engine)
    settings.check()
    assert settings.ranks == 8


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed, so nothing is missing")
def test_without_ray_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'megatron_async\[ray\]'"):
        import megatron_async.ray.app  # noqa: F401


@pytest.mark.skipif(not HAS_RAY, reason="needs the extra `ray`: scripts/check_ray.py runs a fleet")
def test_an_application_is_built() -> None:
    from megatron_async.ray.app import build

    settings = FleetSettings(model="m", engine={"tensor_model_parallel_size": 2}, gpus=1)
    assert build(settings) is not None
