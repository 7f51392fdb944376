"""Messages that are too large fail alone: questions, answers, and what a stranger sends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_async.errors import RequestError
from megatron_async.serving import connection, coordinator
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.messages import PROTOCOL, ClientHello, Welcome
from megatron_async.serving.replica import Replica
from tests.support.harness import EngineFactory, greedy
from tests.support.patience import PATIENCE_S
from tests.support.plain_peer import Peer

LIMIT = 20_000


@pytest.fixture
def served(make_tiny_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A coordinator with a replica, whose messages may have `LIMIT` bytes, and its client."""
    for module in (connection, coordinator):
        monkeypatch.setattr(module, "MOST_BYTES", LIMIT)
    service = Coordinator("tcp://127.0.0.1:*")
    threads = [threading.Thread(target=service.run, daemon=True)]
    engine = make_tiny_engine(lookahead=1)
    replica = Replica(engine, service.address, "tiny", "a")
    threads.append(threading.Thread(target=lambda: asyncio.run(replica.run()), daemon=True))
    for thread in threads:
        thread.start()
    with CoordinatorClient(service.address) as client:
        yield service.address, client
        client.remove_replica("a")
        threads[1].join(PATIENCE_S)
    service.stop()
    threads[0].join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


def test_they_fail_alone(served: Any) -> None:
    _, client = served
    with pytest.raises(RequestError, match=f"takes .* bytes, and a message may have {LIMIT}"):
        client.generate([[1] * LIMIT], greedy(1))
    long_answer = greedy(1, return_log_probs=True, top_n_logprobs=20, skip_prompt_log_probs=False)
    large, small = client.generate(
        [[1, 2, 3] * 60, [1, 2, 3]], [long_answer, greedy(4)], raise_on_failure=False
    )
    assert isinstance(large.error, RequestError)
    assert "the answer cannot be sent" in str(large.error)
    assert small.error is None
    assert len(small.generated_tokens) == 4


def test_a_stranger_is_cut_off(served: Any) -> None:
    address, client = served
    stranger = Peer(address)
    stranger.say(ClientHello(PROTOCOL))
    stranger.hear(Welcome)
    stranger.say(b"x" * (LIMIT + 1))
    assert stranger.is_cut_off()
    stranger.close()
    (answer,) = client.generate([[4, 5]], greedy(3))
    assert len(answer.generated_tokens) == 3
