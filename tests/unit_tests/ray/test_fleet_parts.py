"""The order of batches, and which call carries them."""

from __future__ import annotations

import asyncio

import pytest

from megatron_async.ray.channel import FleetChannel
from megatron_async.ray.messages import (
    FleetBatch,
    InOrder,
    decode_batch,
    first_number,
    ingress_of,
)
from megatron_async.serving.messages import Ended, StepTokens
from tests.support.patience import PATIENCE_S


def test_numbers_say_whose_they_are() -> None:
    assert ingress_of(first_number(7)) == 7 == ingress_of(first_number(7) + 2**32 - 1)
    assert first_number(2**30 - 1) < 2**63


def test_batches_that_come_early_wait_for_those_before() -> None:
    order, seen = InOrder(), []
    for number in (2, 0, 1, 4, 3):
        batch = FleetBatch(number, [], [])
        seen.append([each.sequence for each in order.take(number, batch)])
    assert seen == [[], [0], [1, 2], [], [3, 4]]


def test_when_the_carriers_request_ends_another_call_carries() -> None:
    async def run() -> None:
        channel = FleetChannel(0.0)
        told: dict[int, list[FleetBatch]] = {1: [], 2: [], 3: []}

        async def call(number: int) -> None:
            async for data in channel.carry(number):
                told[number].append(decode_batch(data))

        calls = {number: asyncio.create_task(call(number)) for number in told}
        await asyncio.sleep(0.01)
        channel.tell(StepTokens(ends=[Ended(2)]))  # one that does not carry
        await asyncio.wait_for(calls[2], PATIENCE_S)
        channel.tell(StepTokens(ends=[Ended(1)]))
        await asyncio.wait_for(calls[1], PATIENCE_S)
        channel.tell(StepTokens(ends=[Ended(3)]))
        await asyncio.wait_for(calls[3], PATIENCE_S)
        assert [len(batches) for batches in told.values()][1] == 0
        batches = told[1] + told[3]
        assert [batch.sequence for batch in batches] == list(range(len(batches)))
        ends = [ended.number for batch in batches for step in batch.steps for ended in step.ends]
        assert ends == [2, 1, 3]
        assert told[3]
        assert [number for batch in batches for number in batch.begun] == [1, 2, 3]

    asyncio.run(run())


def test_a_carrier_that_is_cancelled_hands_over() -> None:
    async def run() -> None:
        channel = FleetChannel(0.0)
        first, second = channel.carry(1), channel.carry(2)
        await anext(first)
        coming = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        await first.aclose()
        assert decode_batch(await asyncio.wait_for(coming, PATIENCE_S)).begun == [2]
        await second.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("has_tokens", [True, False])
def test_what_has_begun_is_told_with_the_first_tokens_or_after_a_while(
    has_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.ray.channel.BEGUN_S", 60.0 if has_tokens else 0.05)

    async def run() -> None:
        channel = FleetChannel(0.0)
        calls = channel.carry(1)
        coming = asyncio.ensure_future(anext(calls))
        await asyncio.sleep(0.02)
        assert not coming.done()
        if has_tokens:
            channel.tell(StepTokens(tokens=b"1234"))
        batch = decode_batch(await asyncio.wait_for(coming, PATIENCE_S))
        assert batch.begun == [1]
        assert len(batch.steps) == has_tokens
        await calls.aclose()

    asyncio.run(run())
