"""What a lost replica still has on its way is not told: the fleet is told call by call here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from megatron_async.errors import ReplicaLost
from megatron_async.fleet.client import FleetClient
from megatron_async.fleet.messages import (
    FleetBatch,
    RouteHint,
    decode_run,
    encode_batch,
    first_number,
)
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.messages import Ended, StepTokens
from megatron_async.serving.model_card import ModelCard
from megatron_async.serving.readers import RequestEnd, TokenLogProbs

FIRST = first_number(1)
SECOND = FIRST + 1
PARAMS = SamplingParams(num_tokens_to_generate=4)


class Keeping:
    """A reader that keeps what it is told."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.ends: list[RequestEnd] = []

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        self.got += tokens.tolist()

    def text(self, text: str) -> None:
        raise AssertionError("no replica makes texts here")

    def ended(self, end: RequestEnd) -> None:
        self.ends.append(end)


class Told:
    """A fleet whose calls yield and raise what the test puts into their queues."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, int], asyncio.Queue[bytes | Exception | None]] = {}
        self.aborted: list[tuple[str, int]] = []

    def queue(self, number: int, attempt: int) -> asyncio.Queue[bytes | Exception | None]:
        return self.calls.setdefault((number, attempt), asyncio.Queue())

    async def serve(self, data: bytes, hint: RouteHint) -> AsyncIterator[bytes]:
        run = decode_run(data)
        queue = self.queue(run.asked.number, run.attempt)
        while (found := await queue.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found

    async def abort(self, replica: str, number: int) -> None:
        self.aborted.append((replica, number))

    async def card(self) -> bytes:
        card = ModelCard(model="m", max_sequence_length=64, vocab_size=9, block_size_tokens=16)
        return card.encode()

    def replicas(self) -> Mapping[str, Mapping[str, Any]]:
        return {}


def batch(
    replica: str,
    sequence: int,
    begun: list[tuple[int, int]],
    tokens: dict[int, list[int]],
    ends: tuple[int, ...] = (),
) -> bytes:
    step = StepTokens(
        np.array(list(tokens), np.int64).tobytes(),
        np.array([len(each) for each in tokens.values()], np.int32).tobytes(),
        np.array([token for each in tokens.values() for token in each], np.int32).tobytes(),
        ends=[Ended(number, "length") for number in ends],
    )
    return encode_batch(FleetBatch(replica, sequence, begun, [step]))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_stale_batches_of_a_lost_replica_are_dropped() -> None:
    async def run() -> None:
        fleet = Told()
        client = FleetClient(fleet, ingress=1)
        one, two = Keeping(), Keeping()
        client.send([1], PARAMS, one)
        client.send([2], PARAMS, two)
        await settle()  # both are sent
        carrier = fleet.queue(FIRST, 0)
        both = [(FIRST, 0), (SECOND, 0)]
        carrier.put_nowait(batch("a", 0, both, {FIRST: [1], SECOND: [5, 6]}))
        await settle()
        fleet.queue(SECOND, 0).put_nowait(ReplicaLost("a died"))
        await settle()
        # The carrier of the dead replica has more on its way, an end among it.
        carrier.put_nowait(batch("a", 1, [], {FIRST: [2], SECOND: [7]}, ends=(SECOND,)))
        await settle()
        assert (one.got, two.got, two.ends) == ([1, 2], [5, 6], [])
        again = fleet.queue(SECOND, 1)
        again.put_nowait(batch("b", 0, [(SECOND, 1)], {SECOND: [5]}))
        await settle()
        # Late news of the first attempt do not take the request back.
        carrier.put_nowait(batch("a", 2, [(SECOND, 0)], {SECOND: [8]}))
        await settle()
        again.put_nowait(batch("b", 1, [], {SECOND: [6, 7, 8]}, ends=(SECOND,)))
        again.put_nowait(None)
        carrier.put_nowait(batch("a", 3, [], {FIRST: [3, 4]}, ends=(FIRST,)))
        carrier.put_nowait(None)
        await settle()
        assert (one.got, two.got) == ([1, 2, 3, 4], [5, 6, 7, 8])
        assert [end.attempts for end in (*one.ends, *two.ends)] == [1, 2]
        assert (await client.ask("stats"))["unfinished_requests"] == 0
        await client.close()

    asyncio.run(run())


def test_other_tokens_than_were_delivered_end_the_request() -> None:
    async def run() -> None:
        fleet, reader = Told(), Keeping()
        client = FleetClient(fleet, ingress=1)
        client.send([1], PARAMS, reader)
        first = fleet.queue(FIRST, 0)
        first.put_nowait(batch("a", 0, [(FIRST, 0)], {FIRST: [1, 2]}))
        first.put_nowait(ReplicaLost("a died"))
        fleet.queue(FIRST, 1).put_nowait(batch("b", 0, [(FIRST, 1)], {FIRST: [1, 3]}))
        await settle()
        assert reader.got == [1, 2]
        assert [end.failure and end.failure[0] for end in reader.ends] == ["ReplicaLost"]
        assert fleet.aborted == [("b", FIRST)]
        await client.close()

    asyncio.run(run())


def test_what_kills_two_replicas_before_its_first_token_is_not_sent_again() -> None:
    async def run() -> None:
        fleet, reader = Told(), Keeping()
        client = FleetClient(fleet, ingress=1)
        client.send([1], PARAMS, reader)
        for attempt in (0, 1):
            fleet.queue(FIRST, attempt).put_nowait(ReplicaLost("it died"))
        await settle()
        (end,) = reader.ends
        assert end.failure is not None
        assert "may be what kills them" in end.failure[1]
        assert len(fleet.calls) == 2
        await client.close()

    asyncio.run(run())
