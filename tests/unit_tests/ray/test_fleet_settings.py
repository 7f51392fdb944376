"""What a fleet's settings refuse, Ray's own settings, the order of batches and which call carries
them."""

import asyncio
import importlib.util
import os
from typing import Any

import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.ray.channel import FleetChannel
from megatron_async.ray.fleet_settings import (
    CLUSTER,
    PROCESSES,
    FleetSettings,
    process_environment,
    set_for_cluster,
)
from megatron_async.ray.messages import FleetBatch, InOrder, decode_batch, first_number, ingress_of
from megatron_async.server.api_config import ApiConfig, KeyDigest
from megatron_async.serving.messages import Ended, StepTokens
from tests.support.patience import PATIENCE_S

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
def test_what_cannot_work_is_refused_by_name(fields: dict[str, Any], words: tuple[str, ...]):
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


def test_numbers_say_whose_they_are() -> None:
    assert ingress_of(first_number(7)) == 7 == ingress_of(first_number(7) + 2**32 - 1)
    assert first_number(2**30 - 1) < 2**63


def test_batches_that_come_early_wait_for_those_before() -> None:
    order, seen = InOrder(), []
    for number in (2, 0, 1, 4, 3):
        batch = FleetBatch(number, [], [])
        seen.append([each.sequence for each in order.take(number, batch)])
    assert seen == [[], [0], [1, 2], [], [3, 4]]


def test_when_the_carriers_request_ends_another_call_carries() -> None:
    async def run() -> None:
        channel = FleetChannel(0.0)
        told: dict[int, list[FleetBatch]] = {1: [], 2: [], 3: []}

        async def call(number: int) -> None:
            async for data in channel.carry(number):
                told[number].append(decode_batch(data))

        calls = {number: asyncio.create_task(call(number)) for number in told}
        await asyncio.sleep(0.01)
        channel.tell(StepTokens(ends=[Ended(2)]))  # one that does not carry
        await asyncio.wait_for(calls[2], PATIENCE_S)
        channel.tell(StepTokens(ends=[Ended(1)]))
        await asyncio.wait_for(calls[1], PATIENCE_S)
        channel.tell(StepTokens(ends=[Ended(3)]))
        await asyncio.wait_for(calls[3], PATIENCE_S)
        assert [len(batches) for batches in told.values()][1] == 0
        batches = told[1] + told[3]
        assert [batch.sequence for batch in batches] == list(range(len(batches)))
        ends = [ended.number for batch in batches for step in batch.steps for ended in step.ends]
        assert ends == [2, 1, 3]
        assert told[3]
        assert [number for batch in batches for number in batch.begun] == [1, 2, 3]

    asyncio.run(run())


def test_a_carrier_that_is_cancelled_hands_over() -> None:
    async def run() -> None:
        channel = FleetChannel(0.0)
        first, second = channel.carry(1), channel.carry(2)
        await anext(first)
        coming = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        await first.aclose()
        assert decode_batch(await asyncio.wait_for(coming, PATIENCE_S)).begun == [2]
        await second.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("has_tokens", [True, False])
def test_what_has_begun_is_told_with_the_first_tokens_or_after_a_while(
    has_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.ray.channel.BEGUN_S", 60.0 if has_tokens else 0.05)

    async def run() -> None:
        channel = FleetChannel(0.0)
        calls = channel.carry(1)
        coming = asyncio.ensure_future(anext(calls))
        await asyncio.sleep(0.02)
        assert not coming.done()
        if has_tokens:
            channel.tell(StepTokens(tokens=b"1234"))
        batch = decode_batch(await asyncio.wait_for(coming, PATIENCE_S))
        assert batch.begun == [1]
        assert len(batch.steps) == has_tokens
        await calls.aclose()

    asyncio.run(run())
