"""A replica whose experts others need leaves: it finishes what it has, and steps on for them."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from megatron_async import LLM, SamplingParams
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.replica import serve_replica
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import Ranks
from tests.support.serving_processes import CONFIG, ENGINE

TOKENS = 60


def _params() -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=TOKENS, termination_id=-1, seed=5)


def _replica(address: str) -> None:
    with LLM("dummy:tiny-moe", **ENGINE, expert_model_parallel_size=2) as llm:
        serve_replica(llm, address, "tiny-moe", "moe")


def test_it_helps_until_the_last_has_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "megatron_async")
    coordinator = Coordinator("tcp://127.0.0.1:*", CONFIG)
    thread = threading.Thread(target=coordinator.run)
    thread.start()
    job = Ranks(2, _replica, coordinator.address)
    with LLM("dummy:tiny-moe", **ENGINE) as llm:
        alone = llm.generate([1, 2, 3], _params())[0].generated_tokens
    with CoordinatorClient(coordinator.address) as client:

        def states() -> dict[str, str]:
            return {name: each["state"] for name, each in client.stats()["replicas"].items()}

        def interrupt(name: str) -> None:
            pid = job.processes[int(name[-1])].pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)

        eventually(lambda: len(states()) == 2, "both replicas")
        stream = client.stream([1, 2, 3], _params())
        tokens = list(next(stream).tokens)
        found = client.stats()["replicas"].items()
        first = next(name for name, each in found if each["unfinished_requests"])
        other = next(name for name in states() if name != first)
        with pytest.raises(ValueError, match="drain it"):
            client.pause_replica(first)
        client.remove_replica(first)
        for chunk in stream:
            tokens += chunk.tokens
        assert tokens == alone
        eventually(lambda: states()[first] == "helping", "the first to leave")
        assert f"Replica {first} has left, and helps" in caplog.text
        interrupt(first)
        # A request of the other needs the experts of the one that has left.
        stream = client.stream([1, 2, 3], _params())
        tokens = list(next(stream).tokens)
        assert states() == {first: "helping", other: "ready"}
        interrupt(other)
        for chunk in stream:
            tokens += chunk.tokens
        assert tokens == alone
        for outcome in job.join():
            assert (outcome.exit_code, outcome.error) == (0, "")
        eventually(lambda: not states(), "both to be gone")
    coordinator.stop()
    thread.join(PATIENCE_S)
