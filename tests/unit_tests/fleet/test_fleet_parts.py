"""Routing, the order of batches, and which call carries them."""

from __future__ import annotations

import asyncio

import pytest

from megatron_async.fleet.channel import FleetChannel
from megatron_async.fleet.messages import (
    FleetBatch,
    RouteHint,
    decode_batch,
    first_number,
    ingress_of,
)
from megatron_async.fleet.request import InOrder
from megatron_async.fleet.routing import FleetRouting, routing_of
from megatron_async.serving.messages import Ended, StepTokens
from megatron_async.serving.routing import LeastLoaded, prompt_hashes
from tests.support.patience import PATIENCE_S

STATUS = {"unfinished_tokens": 0, "kv_blocks": 100, "unfinished_requests": 0}
HASHES = tuple(prompt_hashes(list(range(64)), 16))


def two_replicas() -> FleetRouting:
    routing = FleetRouting()
    routing.see({"a": STATUS, "b": STATUS})
    return routing


def test_the_replica_that_has_served_a_prefix_comes_first_while_it_is_not_far_behind() -> None:
    routing = two_replicas()
    hint = RouteHint(1, HASHES, 80, 5)
    routing.given("b", hint)
    assert routing.order(["a", "b"], RouteHint(2, HASHES[:2], 40, 3)) == ["b", "a"]
    assert routing.order(["a", "b"], RouteHint(2, (), 40, 3)) == ["a", "b"]
    routing.see({"a": STATUS, "b": {**STATUS, "unfinished_tokens": 100_000}})
    assert routing.order(["a", "b"], RouteHint(2, HASHES, 40, 3)) == ["a", "b"]
    routing.see({"a": STATUS, "b": STATUS})
    routing.use(LeastLoaded())
    assert routing.order(["a", "b"], RouteHint(2, HASHES, 40, 3)) == ["a", "b"]


def test_what_was_given_counts_before_the_replica_tells_of_it() -> None:
    routing = two_replicas()
    routing.given("a", RouteHint(1, (), 500, 32))
    assert routing.order(["a", "b"], RouteHint(2, (), 40, 3)) == ["b", "a"]
    routing.ended(1)
    routing.given("b", RouteHint(2, (), 40, 3))
    assert routing.order(["a", "b"], RouteHint(3, (), 40, 3)) == ["a", "b"]


def test_a_request_counts_for_the_replica_that_it_was_chosen_for_last() -> None:
    """Many requests at once are chosen for before any replica has taken one."""
    routing = two_replicas()
    for number in range(10):
        hint = RouteHint(number, (), 40, 3)
        routing.given(routing.order(["a", "b"], hint)[0], hint)
    assert routing.order(["a", "b"], RouteHint(90, (), 40, 3)) == ["a", "b"]  # five each
    routing.given("b", RouteHint(0, (), 40, 3))  # "a" had no room for it
    routing.ended(0, "a")  # told late
    routing.ended(2)
    assert routing.order(["a", "b"], RouteHint(90, (), 40, 3)) == ["a", "b"]  # three, and six
    for number in range(1, 10, 2):
        routing.ended(number, "b")
    routing.ended(0, "b")
    assert routing.order(["a", "b"], RouteHint(90, (), 40, 3)) == ["b", "a"]  # three, and none


def test_an_old_status_does_not_count_requests_that_have_ended() -> None:
    routing = two_replicas()
    routing.given("a", RouteHint(1, (), 500, 32))
    routing.see({"a": {**STATUS, "unfinished_tokens": 480}, "b": STATUS})
    routing.ended(1)
    routing.given("b", RouteHint(2, (), 40, 3))
    assert routing.order(["a", "b"], RouteHint(3, (), 40, 3)) == ["a", "b"]


def test_a_replica_that_is_gone_is_forgotten_and_a_new_one_can_serve() -> None:
    routing = two_replicas()
    routing.see({"b": STATUS, "c": {}})
    assert set(routing.replicas()) == {"b", "c"}
    assert set(routing.order(["b", "c"], RouteHint(1, HASHES, 40, 3))) == {"b", "c"}
    routing.ended(1)


def test_a_call_for_one_replica_goes_to_no_other() -> None:
    routing = two_replicas()
    assert routing.order(["a", "b"], RouteHint(1, replica="b")) == ["b"]
    assert routing.order(["a"], RouteHint(1, replica="b")) == []


def test_each_application_has_its_own_routing() -> None:
    assert routing_of("one") is routing_of("one") is not routing_of("two")


def test_numbers_say_whose_they_are() -> None:
    assert ingress_of(first_number(7)) == 7 == ingress_of(first_number(7) + 2**32 - 1)
    assert first_number(2**30 - 1) < 2**63


def test_batches_that_come_early_wait_for_those_before() -> None:
    order, seen = InOrder(), []
    for number in (2, 0, 1, 4, 3):
        batch = FleetBatch("a", number, [], [])
        seen.append([each.sequence for each in order.take(number, batch)])
    assert seen == [[], [0], [1, 2], [], [3, 4]]


def test_when_the_carriers_request_ends_another_call_carries() -> None:
    async def run() -> None:
        channel = FleetChannel("a", 0.0)
        told: dict[int, list[FleetBatch]] = {1: [], 2: [], 3: []}

        async def call(number: int) -> None:
            async for data in channel.carry(number, 0):
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
        assert [pair for batch in batches for pair in batch.begun] == [(1, 0), (2, 0), (3, 0)]

    asyncio.run(run())


def test_a_carrier_that_is_cancelled_hands_over() -> None:
    async def run() -> None:
        channel = FleetChannel("a", 0.0)
        first, second = channel.carry(1, 0), channel.carry(2, 0)
        await anext(first)
        coming = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        await first.aclose()
        assert decode_batch(await asyncio.wait_for(coming, PATIENCE_S)).begun == [(2, 0)]
        await second.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("has_tokens", [True, False])
def test_what_has_begun_is_told_with_the_first_tokens_or_after_a_while(
    has_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.fleet.channel.BEGUN_S", 60.0 if has_tokens else 0.05)

    async def run() -> None:
        channel = FleetChannel("a", 0.0)
        calls = channel.carry(1, 0)
        coming = asyncio.ensure_future(anext(calls))
        await asyncio.sleep(0.02)
        assert not coming.done()
        if has_tokens:
            channel.tell(StepTokens(tokens=b"1234"))
        batch = decode_batch(await asyncio.wait_for(coming, PATIENCE_S))
        assert batch.begun == [(1, 0)]
        assert len(batch.steps) == has_tokens
        await calls.aclose()

    asyncio.run(run())
