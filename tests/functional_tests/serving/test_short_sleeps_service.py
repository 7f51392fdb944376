"""A service whose coordinator and API process sleep shortly, as on hosts with many cores."""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from harness import TINY, greedy, make_engine, make_model
from served import eventually

from megatron_async.server.api_config import ApiConfig
from megatron_async.server.api_process import run_api_process
from megatron_async.serving import short_sleeps
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.replica import Replica

PROMPTS = [[5, 9, number] for number in range(8)]
TOKENS = 40


def serve(address: str, listener: socket.socket) -> None:
    """An API process, on as many cores as it needs."""
    short_sleeps.are_worth_it = lambda: True
    run_api_process(ApiConfig(coordinator=address), listener.detach())


def asked(port: int, prompt: list[int]) -> Any:
    """The answer to a prompt."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"model": "dummy:tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Coordinator, int]]:
    monkeypatch.setattr(short_sleeps, "are_worth_it", lambda: True)
    monkeypatch.setattr(short_sleeps, "PATIENCE_S", 0.2)
    coordinator = Coordinator("tcp://127.0.0.1:*")
    engine = make_engine(make_model(TINY), lookahead=1)
    replica = Replica(engine, coordinator.address, "dummy:tiny", "a")
    threads = [
        threading.Thread(target=coordinator.run, daemon=True),
        threading.Thread(target=lambda: asyncio.run(replica.run()), daemon=True),
    ]
    for thread in threads:
        thread.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        spawn = multiprocessing.get_context("spawn").Process
        api = spawn(target=serve, args=(coordinator.address, listener), daemon=True)
        api.start()
        eventually(lambda: "choices" in asked(port, [1]), "the service to answer")
        yield coordinator, port
        api.terminate()  # it drains, and its timer goes with it
        api.join(20)
        assert api.exitcode == 0
    with CoordinatorClient(coordinator.address) as client:
        client.remove_replica("a")
    threads[1].join(10)
    coordinator.stop()
    threads[0].join(5)
    assert not any(thread.is_alive() for thread in threads)
    engine.close()


def test_answers_are_those_of_the_engine_and_an_idle_service_sleeps(
    service: tuple[Coordinator, int],
) -> None:
    """Break it: never stop the timer; let a tick end the coordinator's wait for messages."""
    coordinator, port = service
    ticks = coordinator._sleeps
    assert ticks is not None
    alone = make_engine(make_model(TINY), lookahead=1)
    expected = alone.generate(PROMPTS, greedy(TOKENS, termination_id=-1))
    answers: list[Any] = [None] * len(PROMPTS)

    def ask(number: int) -> None:
        answers[number] = asked(port, PROMPTS[number])

    readers = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for reader in readers:
        reader.start()
    eventually(lambda: ticks._runs, "the coordinator to stay awake")
    for reader in readers:
        reader.join(60)
    for answer, request in zip(answers, expected, strict=True):
        assert answer["choices"][0]["token_ids"] == request.generated_tokens
    eventually(lambda: not ticks._runs, "the coordinator to sleep")
    alone.close()
