"""Models over ranks behind Megatron's coordinator: one rank's tokens, and states on every rank."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async import LLM, SamplingParams
from megatron_async.errors import ConfigurationError
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.replica import Replica
from tests.support.compat_trio import compat_engine
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import Ranks, run_ranks
from tests.support.spread_service import (
    PROMPTS,
    STATES,
    TOKENS,
    generate_by_megatron_llm,
    lose_while_paused,
    serve_and_lose,
    serve_spread,
    start_where_refused,
    start_with_other_settings,
)

TP = ParallelSizes(tensor_model_parallel=2)
PP = ParallelSizes(pipeline_model_parallel=2)
EP = ParallelSizes(expert_model_parallel=2)
BOTH = ParallelSizes(tensor_model_parallel=2, expert_model_parallel=2)
CASES = {
    "tensor": ("dummy:tiny", TP, 2),
    "pipeline": ("dummy:tiny", PP, 2),
    "experts": ("dummy:tiny-moe", EP, 2),
    "two replicas of two": ("dummy:tiny", TP, 4),
    "two of two that share experts": ("dummy:tiny-moe", BOTH, 4),
}
ENGINE = {"device": "cpu", "block_size_tokens": 16, "num_kv_blocks": 64, "max_requests": 8}
GRACE_S = 1.0
"""Seconds after which a rank ends its process that needs a lost one."""


def alone(model: str) -> list[list[int]]:
    """Tokens of one rank's `LLM`: greedy ones, then sampled ones."""
    greedy = SamplingParams(num_tokens_to_generate=TOKENS, termination_id=-1, top_k=1)
    drawn = SamplingParams(
        num_tokens_to_generate=TOKENS, termination_id=-1, top_k=0, temperature=1.0, seed=9
    )
    with LLM(model, **ENGINE) as llm:
        found = [llm.generate(PROMPTS, params) for params in (greedy, drawn)]
    return [list(request.generated_tokens) for some in found for request in some]


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_one_ranks_tokens_and_change_states_together(name: str) -> None:
    model, sizes, count = CASES[name]
    expected = alone(model)
    assert len({token for tokens in expected for token in tokens}) > TOKENS
    found: list[dict[str, Any]] = run_ranks(count, serve_spread, model, sizes)
    for number in range(2):
        assert found[0]["served"][number]["answers"] == expected
        assert [rank["served"][number]["states"] for rank in found] == [STATES] * count
        assert {rank["served"][number]["epoch"] for rank in found} == {1}
    replicas = [rank["finished"] for rank in found[:: sizes.replica]]
    assert sum(replicas) == 2 * len(expected)
    assert min(replicas) > 0


def test_another_replica_serves_what_a_lost_rank_leaves(tmp_path: Path) -> None:
    expected = alone("dummy:tiny")[: len(PROMPTS)]
    settings = {"MEGATRON_ASYNC_LOSS_GRACE_S": str(GRACE_S)}
    job = Ranks(4, serve_and_lose, str(tmp_path), TP, environment=settings)
    wait_for(tmp_path / "serves", job)
    job.kill(3)
    (tmp_path / "killed").touch()
    outcomes = job.join(PATIENCE_S)
    for outcome in outcomes[:2]:  # they need neither of the other replica's ranks
        assert (outcome.error, outcome.exit_code) == ("", 0)
        assert outcome.value["error"] == ""
    answers = outcomes[0].value["answers"]
    assert len(answers) > 1
    assert all(some == expected for some in answers)
    assert outcomes[2].value == {"error": "RankLost"}


@pytest.mark.parametrize("lost", [0, 1])
def test_who_waits_for_a_state_learns_that_a_rank_is_lost(tmp_path: Path, lost: int) -> None:
    job = Ranks(2, lose_while_paused, str(tmp_path), TP)
    for rank in range(2):
        wait_for(tmp_path / str(rank), job)
    job.kill(lost)
    outcome = job.join()[1 - lost]
    assert outcome.error == ""
    assert outcome.value == {"error": "RankLost"}


def test_ranks_with_other_settings_are_refused_on_all_of_them() -> None:
    for said in run_ranks(2, start_with_other_settings, TP):
        assert said.startswith("ConfigurationError")
        assert "max_sequence_length" in said
        assert "64" in said


def test_all_ranks_learn_that_the_coordinator_refuses_one(tiny_model: torch.nn.Module) -> None:
    coordinator = Coordinator("tcp://127.0.0.1:*")
    with compat_engine(tiny_model) as engine:
        replica = Replica(engine, coordinator.address, "other", "dp-0")
        threads = [
            threading.Thread(target=coordinator.run, daemon=True),
            threading.Thread(target=lambda: asyncio.run(replica.run()), daemon=True),
        ]
        for thread in threads:
            thread.start()
        with CoordinatorClient(coordinator.address) as client:
            while not client.stats()["replicas"]:
                time.sleep(0.02)
            port = int(coordinator.address.rpartition(":")[2])
            first, second = run_ranks(2, start_where_refused, port, TP)
            client.remove_replica("dp-0")
        threads[1].join(PATIENCE_S)
        coordinator.stop()
        threads[0].join(PATIENCE_S)
    assert "a replica named 'dp-0' is there" in first["error"]
    assert "rank 0 could not come behind the coordinator: " in second["error"]
    assert first["error"] in second["error"]
    assert first["answers"] == second["answers"] == alone("dummy:tiny")[: len(PROMPTS)]


@pytest.mark.parametrize("name", ["tensor", "experts"])
def test_megatron_llm_serves_them(name: str) -> None:
    model, sizes, count = CASES[name]
    found = run_ranks(count, generate_by_megatron_llm, model, sizes)
    assert found[0]["answers"] == alone(model)[: len(PROMPTS)]
    assert found[1]["answers"] == []
    assert all(("use_coordinator" in one["refused"]) is (name == "experts") for one in found)


def test_groups_of_a_models_own_are_refused(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        served = engine.controller.inference_wrapped_model.model
        given, served.pg_collection = (
            served.pg_collection,
            SimpleNamespace(tp=SimpleNamespace(size=lambda: 2)),
        )
        try:
            with pytest.raises(ConfigurationError, match=r"pg_collection.tp has 2 ranks"):
                asyncio.run(engine.start_listening_to_data_parallel_coordinator())
        finally:
            served.pg_collection = given


def wait_for(file: Path, job: Ranks) -> None:
    eventually(lambda: file.exists() or not all(each.is_alive() for each in job.processes))
    assert file.exists(), job.join(0)
