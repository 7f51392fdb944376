"""A service whose weights are replaced under way: tokens of a fresh engine, versions in answers,
torn rounds, replicas that are killed and come back."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async import LLM, SamplingParams
from megatron_async.errors import UpdateError
from megatron_async.serving import weight_client
from megatron_async.serving.async_client import AsyncCoordinatorClient
from megatron_async.serving.replica import serve_replica
from megatron_async.serving.weight_client import update_weights
from megatron_async.serving.weight_sources import FOLDER_VARIABLE
from tests.support.patience import eventually
from tests.support.ranks import Ranks
from tests.support.serving_processes import ENGINE, Service, long_sampling
from tests.support.trained_weights import train

MODEL = "dummy:tiny"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [9] * 20]
PARAMS = SamplingParams(num_tokens_to_generate=12, termination_id=-1, seed=5)


def updated_process(address: str, name: str, ranks: int, folder: str) -> None:
    os.environ[FOLDER_VARIABLE] = folder
    with LLM(MODEL, tensor_model_parallel_size=ranks, **ENGINE) as llm:
        serve_replica(llm, address, "tiny", name)


@dataclass
class Trained:
    """Weights of two steps of a trainer: their tensors, and the tokens of a fresh engine."""

    root: Path
    tensors: list[dict[str, torch.Tensor]]
    tokens: list[list[list[int]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("weights")
    found = Trained(root, [], [])
    for step in range(2):
        folder = root / f"step-{step}"
        found.tensors.append(train(folder, step))
        with LLM(str(folder), **ENGINE) as llm:
            found.tokens.append([r.generated_tokens for r in llm.generate(PROMPTS, PARAMS)])
    assert found.tokens[0] != found.tokens[1]
    return found


class Updated(Service):
    """A service, and its weights."""

    def __init__(self, trained: Trained) -> None:
        super().__init__("tcp://127.0.0.1:*")
        self._trained = trained

    def begin(self, ranks: int = 1) -> str:
        name = f"u{self._started}"
        self._started += 1
        arguments = (self.address, name, ranks, str(self._trained.root))
        self.processes[name] = Ranks(ranks, updated_process, *arguments)
        eventually(lambda: name in self.names(), f"replica {name}")
        return name

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        eventually(lambda: name not in self.names(), "the death to be noticed")

    def update(self, weights: Any, version: Any, **options: Any) -> dict[str, Any]:
        async def update() -> dict[str, Any]:
            async with AsyncCoordinatorClient(self.address) as client:
                return await update_weights(client, weights, version, **options)

        return asyncio.run(update())

    def tokens(self) -> list[list[int]]:
        return [answer.generated_tokens for answer in self.client.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def service(trained: Trained) -> Iterator[Updated]:
    service = Updated(trained)
    service.begin()
    service.begin(ranks=2)
    yield service
    service.close()


def test_weights_are_replaced_on_all_ranks_of_all_replicas(
    service: Updated, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = service.tokens()
    streams = [service.client.stream(PROMPTS[0], long_sampling()) for _ in range(2)]
    for stream in streams:
        next(stream)
    monkeypatch.setattr(weight_client, "BUCKET_BYTES", 20_000)  # tensors come in pieces
    told = service.update(trained.tensors[0].items(), "step 0")
    assert told["stale"] == {}
    assert {each["version"] for each in told["replicas"].values()} == {"step 0"}
    assert len(told["replicas"]) == 2
    assert before != service.tokens() == trained.tokens[0]
    (answer,) = service.client.generate([PROMPTS[0]], PARAMS)
    assert answer.weight_versions == [("step 0", 0, 12)]
    assert answer.kv_versions == [("step 0", 0, 3 + 12 - 1)]
    for stream in streams:
        assert sum(len(chunk.tokens) for chunk in stream) > 0
    sums = service.client.ask("weights_check")
    assert sums["is_equal"], "with one rank and with two"
    assert all(each["stale_copies"] == [] for each in sums["replicas"].values())


def test_a_torn_round_leaves_the_weights_before(service: Updated, trained: Trained) -> None:
    service.update(trained.tensors[0].items(), "whole")
    wrong = {**trained.tensors[1], "model.unheard_of": torch.zeros(3)}
    with pytest.raises(UpdateError, match="unheard_of"):
        service.update(wrong.items(), "torn")
    few = dict(list(trained.tensors[1].items())[:3])
    with pytest.raises(UpdateError, match="dropped"):
        service.update(few.items(), "torn")
    gate = "model.layers.0.mlp.gate_proj.weight"
    half = {**trained.tensors[1], gate: trained.tensors[1][gate].chunk(2)[0]}
    with pytest.raises(UpdateError, match=r"wrong shape.*; .*wrong shape"):  # a shard of two
        service.update(half.items(), "torn")
    with pytest.raises(ValueError, match="cannot be sent"):
        service.client.ask("weights_label", version=2**70)
    assert service.tokens() == trained.tokens[0]
    (answer,) = service.client.generate([PROMPTS[0]], PARAMS)
    assert answer.weight_versions == [("whole", 0, 12)]


def test_a_torn_round_without_a_second_memory_stops_all_until_a_whole_one_comes(
    service: Updated, trained: Trained
) -> None:
    few = dict(list(trained.tensors[1].items())[:3])
    with pytest.raises(UpdateError, match="dropped"):
        service.update(few.items(), "torn", staging="none")
    health = service.client.ask("health")
    assert (health["state"], health["replicas"]) == ("stale", 0)
    with pytest.raises(ValueError, match="a partial update needs"):
        service.update(few.items(), "torn", partial=True)
    assert service.update(trained.tensors[1].items(), "whole", staging="none")["stale"] == {}
    assert service.tokens() == trained.tokens[1]


def test_a_paused_service_is_updated(service: Updated, trained: Trained) -> None:
    service.client.ask("pause")
    service.update(trained.tensors[1].items(), 1, way="rolling")
    service.client.ask("resume")
    assert service.tokens() == trained.tokens[1]


def test_replicas_die_in_mid_round_and_come_back(trained: Trained) -> None:
    service = Updated(trained)
    try:
        first, second = service.begin(), service.begin()
        ask, tensors = service.client.ask, trained.tensors[0]
        key = ask("weights_begin", version="step 0")["round"]
        names = list(tensors)
        messages = [
            [[n, "F32", list(t.shape), t.numpy().tobytes()] for n, t in part]
            for part in ([(n, tensors[n]) for n in names[:4]], [(n, tensors[n]) for n in names[4:]])
        ]
        ask("weights_load", round=key, tensors=messages[0])
        service.kill(second)
        ask("weights_load", round=key, tensors=messages[1])
        assert set(ask("weights_finish", round=key)["replicas"]) == {first}
        third = service.begin()
        assert ask("health") == {
            "state": "running", "replicas": 1, "stale": [third], "weight_version": "step 0",
        }  # fmt: skip
        assert service.tokens() == trained.tokens[0]
        assert set(service.update("step-1", 1)["replicas"]) == {first, third}
        fourth = service.begin()
        eventually(lambda: "stale" not in ask("health"), "it to be brought up")
        for name in (first, third):
            service.kill(name)
        assert service.tokens() == trained.tokens[1]
        assert service.names() == {fourth}
    finally:
        service.close()
