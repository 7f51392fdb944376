"""Requests of a client that is there before the first replica, and those that fail."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from megatron_async.errors import ReplicaLost, RequestError
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.messages import Abort, Ended, Goodbye, Run
from megatron_async.serving.records import CoordinatorConfig
from tests.support.patience import PATIENCE_S
from tests.unit_tests.serving.test_malformed_messages import Peer, replica
from tests.unit_tests.serving.told_service import tokens_of


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """One that keeps requests without a replica for half a second."""
    config = CoordinatorConfig(ping_interval_s=0.1, no_replica_timeout_s=0.5)
    coordinator = Coordinator("tcp://127.0.0.1:*", config)
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    yield coordinator
    coordinator.stop()
    thread.join(PATIENCE_S)


def answer(peer: Peer, *failures: tuple[str, str] | None) -> None:
    """End requests as they come."""
    for failure in failures:
        run = peer.hear(Run)
        step = tokens_of({run.number: [7]})
        step.ends.append(Ended(run.number, "length", failure))
        peer.say(step)


def test_requests_wait_for_a_replica_that_loads(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than the coordinator keeps what nobody serves; who waits is told once."""
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
