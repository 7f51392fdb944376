"""Requests of a client that is there before the first replica, those that fail, and the books of
them."""

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_async.errors import ReplicaLost, RequestError
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.messages import Abort, Ended, Goodbye, Run
from megatron_async.serving.readers import TokenLogProbs, TokenReader
from megatron_async.serving.records import CoordinatorConfig
from tests.support.plain_peer import running
from tests.unit_tests.serving.test_malformed_messages import Peer, replica
from tests.unit_tests.serving.told_service import tokens_of


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """One that keeps requests without a replica for half a second."""
    config = CoordinatorConfig(ping_interval_s=0.1, no_replica_timeout_s=0.5)
    with running(Coordinator("tcp://127.0.0.1:*", config)) as found:
        yield found


def answer(peer: Peer, *failures: tuple[str, str] | None) -> None:
    """End requests as they come."""
    for failure in failures:
        run = peer.hear(Run)
        step = tokens_of({run.number: [7]})
        step.ends.append(Ended(run.number, "length", failure))
        peer.say(step)


def test_requests_wait_for_a_replica_that_loads(coordinator: Coordinator, caplog):
    """Longer than the coordinator keeps what nobody serves; a waiting client is told once."""
    peers: list[Peer] = []

    def load() -> None:
        time.sleep(1.5)
        peers.append(replica(coordinator.address))
        answer(peers[0], None, None, None)

    loading = threading.Thread(target=load)
    loading.start()
    with CoordinatorClient(coordinator.address) as client:
        assert client.generate([1])[0].generated_tokens == [7]
        assert [c.generated_tokens for c in client.generate([[1], [2]])] == [[7], [7]]
        loading.join()
        told = [r for r in caplog.records if "has no replica yet" in r.message]
        assert [record.levelno for record in told] == [logging.WARNING]
        # Once there has been one, it is the coordinator that keeps what nobody serves.
        peers[0].say(Goodbye())
        with pytest.raises(ReplicaLost, match="there has been no replica to serve it"):
            client.generate([1])
    peers[0].close()


def test_nobody_came(coordinator: Coordinator) -> None:
    with CoordinatorClient(coordinator.address, replica_timeout_s=0.3) as client:
        for ask in (lambda: client.generate([[1], [2]]), lambda: next(client.stream([1]))):
            with pytest.raises(ReplicaLost, match=r"within 0\.3 s: start one with"):
                ask()
        assert client.stats()["received_requests"] == 0


def test_a_failure_is_raised_unless_asked_not_to(coordinator: Coordinator) -> None:
    peer = replica(coordinator.address)
    failure = ("RequestError", "the prompt is empty")
    with CoordinatorClient(coordinator.address) as client:
        serving = threading.Thread(target=lambda: answer(peer, failure, None, failure))
        serving.start()
        with pytest.raises(RequestError, match="the prompt is empty") as raised:
            client.generate([1])
        assert not hasattr(raised.value, "__notes__")
        good, bad = client.generate([[1], [2]], raise_on_failure=False)
        assert good.error is None
        assert isinstance(bad.error, RequestError)
        serving.join()
        serving = threading.Thread(target=lambda: answer(peer, None, failure))
        serving.start()
        with pytest.raises(RequestError) as raised:
            client.generate([[1], [2], [3]])
        assert "prompt 1 of 3" in raised.value.__notes__[0]
        peer.hear(Abort)
        serving.join()
    peer.close()


class Told(TokenReader):
    """Keeps what a reader is told."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        chosen = None if log_probs is None else log_probs.chosen.tolist()
        self.all.append((tokens.tolist(), chosen))

    def text(self, text: str) -> None:
        self.all.append(text)

    def ended(self, end: Ended) -> None:
        self.all.append(end.finish_reason)
        self.failure = end.failure


def tell(request: TokenReader, *tokens: int, asks: bool = False) -> bool:
    data = np.array(tokens, np.int32)
    log_probs = TokenLogProbs(data.astype(np.float32)) if asks else None
    return request.hear_tokens(memoryview(data), log_probs)


def failure_of(request: Told, ended: Ended) -> tuple[str, str] | None:
    request.hear_end(ended)
    return request.failure


def test_what_comes_again_is_told_once() -> None:
    request = Told()
    assert tell(request, 1, 2, 3, asks=True)
    request.hear_text("one two")
    for first in ((1,), (1, 2)):
        request.again()
        assert tell(request, *first, asks=True)
    request.hear_text("one ")
    assert tell(request, 3, 4, 5, asks=True)
    request.hear_text("two three")
    assert tell(request, 6, asks=True)
    assert failure_of(request, Ended(0, "length", text=" four")) is None
    expected = [([1, 2, 3], [1.0, 2.0, 3.0]), "one two", ([4, 5], [4.0, 5.0]), " three"]
    assert request.all == [*expected, ([6], [6.0]), " four", "length"]
    assert np.frombuffer(request.generated, np.int32).tolist() == [1, 2, 3, 4, 5, 6]


def test_other_tokens_and_an_early_end_contradict() -> None:
    for tokens in ((9,), (1, 9), (1, 2, 9, 4)):
        request = Told()
        tell(request, 1, 2, 3)
        request.again()
        assert not tell(request, *tokens)
    request = Told()
    tell(request, 1, 2, 3)
    request.again()
    assert tell(request, 1, 2)
    assert failure_of(request, Ended(0, "length")) == ("ReplicaLost", request.why_lost())
    gone = ("ReplicaLost", "gone")
    assert failure_of(request, Ended(0, "error", gone)) == gone
    assert tell(request, 3)
    assert failure_of(request, Ended(0, "length")) is None


def test_nothing_delivered_contradicts_nothing() -> None:
    request = Told()
    request.again()
    assert failure_of(request, Ended(0, "length")) is None
    assert tell(request, 5)
