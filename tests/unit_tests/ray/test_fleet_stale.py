"""What a fleet tells call by call: of a lost replica nothing more is told, and what it had is sent
again; the rules are the dispatcher's."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import pytest

from megatron_async.errors import ReplicaLost
from megatron_async.ray import client as client_module
from megatron_async.ray.client import FleetClient
from megatron_async.ray.messages import FleetBatch, encode_batch, first_number
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.messages import (
    PROTOCOL,
    Ended,
    ReplicaHello,
    ReplicaInfo,
    Run,
    StepTokens,
    decode_for_replica,
    encode,
)
from megatron_async.serving.model_card import ModelCard
from megatron_async.serving.readers import TokenLogProbs, TokenReader

FIRST = first_number(1)
SECOND = FIRST + 1
PARAMS = SamplingParams(num_tokens_to_generate=4)
STATUS = {"unfinished_tokens": 0, "free_blocks": 99}


class Keeping(TokenReader):
    """A reader that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[int] = []
        self.ends: list[Ended] = []

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        self.got += tokens.tolist()

    def text(self, text: str) -> None:
        raise AssertionError("no replica makes texts here")

    def ended(self, end: Ended) -> None:
        self.ends.append(end)


class Told:
    """A fleet whose calls yield and raise what the test puts into their queues."""

    def __init__(self, *names: str) -> None:
        self.there: dict[str, dict[str, Any]] = {name: STATUS for name in names}
        self.calls: dict[tuple[str, int], asyncio.Queue[bytes | Exception | None]] = {}
        self.aborted: list[tuple[str, int]] = []
        self.over: list[tuple[str, int]] = []

    def queue(self, replica: str, number: int) -> asyncio.Queue[bytes | Exception | None]:
        return self.calls.setdefault((replica, number), asyncio.Queue())

    async def serve(self, data: bytes, replica: str) -> AsyncIterator[bytes]:
        run = decode_for_replica(data)
        assert isinstance(run, Run)
        queue = self.queue(replica, run.number)
        try:
            while (found := await queue.get()) is not None:
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            self.over.append((replica, run.number))

    async def abort(self, replica: str, number: int) -> None:
        self.aborted.append((replica, number))

    async def hello(self, replica: str) -> bytes:
        info = ReplicaInfo(
            name=replica, instance=replica, model={}, slots=2, kv_blocks=99, block_size_tokens=16
        )
        return encode(ReplicaHello(PROTOCOL, info))

    async def card(self) -> bytes:
        card = ModelCard(model="m", max_sequence_length=64, vocab_size=9, block_size_tokens=16)
        return card.encode()

    def replicas(self) -> Mapping[str, Mapping[str, Any]]:
        return self.there


def batch(
    sequence: int, begun: list[int], tokens: dict[int, list[int]], ends: tuple[int, ...] = ()
) -> bytes:
    step = StepTokens(
        np.array(list(tokens), np.int64).tobytes(),
        np.array([len(each) for each in tokens.values()], np.int32).tobytes(),
        np.array([token for each in tokens.values() for token in each], np.int32).tobytes(),
        ends=[Ended(number, "length") for number in ends],
    )
    return encode_batch(FleetBatch(sequence, begun, [step]))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_lost_replicas_requests_are_sent_again_and_its_late_news_are_dropped() -> None:
    async def run() -> None:
        fleet, one, two = Told("a"), Keeping(), Keeping()
        client = FleetClient(fleet, ingress=1)
        client.send([1], PARAMS, one)
        client.send([2], PARAMS, two)
        await settle()  # both are sent
        assert list(fleet.calls) == [("a", FIRST), ("a", SECOND)]
        carrier = fleet.queue("a", FIRST)
        carrier.put_nowait(batch(0, [FIRST, SECOND], {FIRST: [1], SECOND: [5, 6]}))
        await settle()
        fleet.there["b"] = STATUS
        await client.ask("health")
        await settle()
        fleet.queue("a", SECOND).put_nowait(ReplicaLost("a died"))
        carrier.put_nowait(batch(1, [], {FIRST: [9], SECOND: [9]}, ends=(SECOND,)))
        await settle()
        assert (one.got, two.got, one.ends, two.ends) == ([1], [5, 6], [], [])
        assert set(fleet.over) == {("a", FIRST), ("a", SECOND)}
        again = fleet.queue("b", SECOND)
        again.put_nowait(batch(0, [FIRST, SECOND], {SECOND: [5], FIRST: [1, 2]}))
        await settle()
        assert (one.got, two.got) == ([1, 2], [5, 6])
        last = batch(1, [], {SECOND: [6, 7, 8], FIRST: [3, 4]}, ends=(SECOND, FIRST))
        again.put_nowait(last)
        again.put_nowait(None)
        fleet.queue("b", FIRST).put_nowait(None)
        await settle()
        assert (one.got, two.got) == ([1, 2, 3, 4], [5, 6, 7, 8])
        assert [end.attempts for end in (*one.ends, *two.ends)] == [2, 2]
        stats = await client.ask("stats")
        assert (stats["unfinished_requests"], stats["retried_requests"]) == (0, 2)
        assert len(fleet.calls) == 4
        await client.close()

    asyncio.run(run())


def test_other_tokens_than_were_delivered_end_the_request() -> None:
    async def run() -> None:
        fleet, reader = Told("a"), Keeping()
        client = FleetClient(fleet, ingress=1)
        client.send([1], PARAMS, reader)
        await settle()
        fleet.there["b"] = STATUS
        await client.ask("health")
        await settle()
        first = fleet.queue("a", FIRST)
        first.put_nowait(batch(0, [FIRST], {FIRST: [1, 2]}))
        first.put_nowait(ReplicaLost("a died"))
        fleet.queue("b", FIRST).put_nowait(batch(0, [FIRST], {FIRST: [1, 3]}))
        await settle()
        assert reader.got == [1, 2]
        assert [end.failure and end.failure[0] for end in reader.ends] == ["ReplicaLost"]
        assert fleet.aborted == [("b", FIRST)]
        await client.close()

    asyncio.run(run())


def test_what_kills_two_replicas_before_its_first_token_is_not_sent_again() -> None:
    async def run() -> None:
        fleet, reader = Told("a", "b", "c"), Keeping()
        client = FleetClient(fleet, ingress=1)
        client.send([1], PARAMS, reader)
        await settle()
        for _ in range(2):
            for queue in fleet.calls.values():
                queue.put_nowait(ReplicaLost("it died"))
            await settle()
        (end,) = reader.ends
        assert end.failure is not None
        assert "may be what kills them" in end.failure[1]
        assert len(fleet.calls) == 2
        await client.close()

    asyncio.run(run())


def test_a_request_is_aborted_once_its_replica_has_begun_it() -> None:
    async def run() -> None:
        fleet, reader = Told("a"), Keeping()
        client = FleetClient(fleet, ingress=1)
        number = client.send([1], PARAMS, reader)
        await settle()
        client.abort(number)
        await settle()
        assert fleet.aborted == []
        fleet.queue("a", FIRST).put_nowait(batch(0, [FIRST], {}))
        await settle()
        assert fleet.aborted == [("a", FIRST)]
        await client.close()

    asyncio.run(run())


def test_a_replica_that_leaves_finishes_what_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LATE_S", 0.01)

    async def run() -> None:
        fleet, one, two = Told("a"), Keeping(), Keeping()
        client = FleetClient(fleet, ingress=1)
        client.send([1], PARAMS, one)
        client.send([2], PARAMS, two)
        await settle()
        fleet.queue("a", FIRST).put_nowait(batch(0, [FIRST], {FIRST: [1]}))
        await settle()
        fleet.there = {"b": STATUS}
        await client.ask("health")
        await asyncio.sleep(0.05)
        assert list(fleet.calls) == [("a", FIRST), ("a", SECOND), ("b", SECOND)]
        fleet.queue("a", FIRST).put_nowait(batch(1, [], {FIRST: [2]}, ends=(FIRST,)))
        await settle()
        assert (one.got, len(one.ends), two.ends) == ([1, 2], 1, [])
        client.send([3], PARAMS, one)
        await settle()
        assert list(fleet.calls)[3:] == [("b", FIRST + 2)]
        await client.close()

    asyncio.run(run())


def test_requests_go_where_the_least_is_to_be_done() -> None:
    async def run() -> None:
        fleet = Told("a", "b")
        client = FleetClient(fleet, ingress=1)
        await client.ask("health")
        await settle()
        for number in range(4):
            client.send([number], PARAMS, Keeping())
        await settle()
        assert [name for name, _ in fleet.calls] == ["a", "b", "a", "b"]
        fleet.there = {"a": {**STATUS, "unfinished_tokens": 1000}, "b": STATUS}
        for number in range(2):
            client.send([number], PARAMS, Keeping())
        await settle()
        assert [name for name, _ in fleet.calls][4:] == ["b", "b"]
        await client.close()

    asyncio.run(run())
