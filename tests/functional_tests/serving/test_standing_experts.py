"""Replicas that share experts are paused, sleep and get new weights at one step."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_async import LLM, SamplingParams
from megatron_async.serving.async_client import AsyncCoordinatorClient
from megatron_async.serving.replica import serve_replica
from megatron_async.serving.weight_client import update_weights
from tests.support.patience import eventually
from tests.support.ranks import Ranks
from tests.support.serving_processes import ENGINE, Service
from tests.support.trained_weights import train

MODEL = "dummy:tiny-moe"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
PARAMS = SamplingParams(num_tokens_to_generate=100, termination_id=-1, seed=3)


def expert_rank(address: str) -> None:
    with LLM(MODEL, expert_model_parallel_size=2, **ENGINE) as llm:
        serve_replica(llm, address, MODEL, "e")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service("tcp://127.0.0.1:*")
    service.processes["e"] = Ranks(2, expert_rank, service.address)
    eventually(lambda: service.names() == {"e-0", "e-1"}, "both replicas")
    yield service
    service.close()


def tokens_of(answers: Sequence[Any]) -> list[list[int]]:
    return [answer.generated_tokens for answer in answers]


def steps_of(service: Service) -> list[int]:
    """Steps of each replica, once it has done what it was told before."""
    return [told["steps"] for told in service.client.ask("watch")["replicas"].values()]


def test_they_stop_together_and_go_on_to_the_same_tokens(service: Service) -> None:
    ask = service.client.ask
    streams = [service.client.stream(prompt, PARAMS) for prompt in PROMPTS]
    tokens = [list(next(stream).tokens) for stream in streams]
    for stop, go_on, state in (("pause", "resume", "paused"), ("sleep", "wake", "sleeping")):
        ask(stop)
        steps = steps_of(service)
        assert min(steps) > 0
        assert ask("health") == {"state": state, "replicas": 0}
        assert steps_of(service) == steps, "no step is launched"
        ask(go_on)
    for stream, got in zip(streams, tokens, strict=True):
        for chunk in stream:
            got += chunk.tokens
    assert tokens == tokens_of(service.client.generate(PROMPTS, PARAMS))


def test_they_commit_new_weights_at_one_step(service: Service, tmp_path: Path) -> None:
    before = tokens_of(service.client.generate(PROMPTS, PARAMS))
    tensors = train(tmp_path / "new", 1, MODEL)

    async def update(way: str) -> Any:
        async with AsyncCoordinatorClient(service.address) as client:
            return await update_weights(client, tensors.items(), way, way=way)

    for way in ("together", "rolling"):
        stream = service.client.stream(PROMPTS[0], PARAMS)
        next(stream)
        told = asyncio.run(update(way))
        assert told["stale"] == {}
        assert len({each["step"] for each in told["replicas"].values()}) == 1
        assert list(stream)
    with LLM(str(tmp_path / "new"), **ENGINE) as llm:
        fresh = llm.generate(PROMPTS, PARAMS)
    assert before != tokens_of(service.client.generate(PROMPTS, PARAMS)) == tokens_of(fresh)
    assert service.client.ask("weights_check")["is_equal"]
