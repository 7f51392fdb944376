"""Counters of what is in flight, over pauses, evictions, aborts and failures: no token is lost,
doubled or late, and overlap stays on afterwards."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine, DynamicInferenceRequest
from megatron_async.planning.request_slots import SlotState
from megatron_async.requests.inference_request import DynamicInferenceEventType
from tests.support.harness import EngineFactory, greedy, random_prompts
from tests.support.late_device import LateDevice
from tests.support.step_watch import StepWatch

TOKENS = 24
PROMPTS = random_prompts(51, (9, 14, 40, 5))
LONG = 20
CRAMPED = {"num_kv_blocks": 21, "block_size_tokens": 4, "max_requests": 4, "max_tokens": 20}


class Watched:
    """An engine whose every step is checked; by request id, the tokens that it reports, and how
    often as the first."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine
        self.emitted: dict[int, list[int]] = {}
        self.firsts: dict[int, int] = {}
        self._watch = StepWatch(engine)

    def add(self, number: int, tokens: int = TOKENS) -> asyncio.Future[DynamicInferenceRequest]:
        """Request `number`, of the prompt of that number."""
        self.emitted[number], self.firsts[number] = [], 0
        prompt = PROMPTS[number % len(PROMPTS)]
        return self.engine.add_request(number, prompt, greedy(tokens))

    def step(self) -> None:
        """One step."""
        self._watch.before_step()
        report = self.engine.step_modern()
        for output in report["outputs"]:
            for request_id, token in zip(output.token_request_ids, output.tokens, strict=True):
                self.emitted[int(request_id)].append(int(token))
            for request_id in output.request_ids[output.is_first]:
                self.firsts[int(request_id)] += 1
        self._watch.after_step()

    def drain(self) -> None:
        """Steps to the end of all requests."""
        while self.engine.has_unfinished_requests():
            self.step()

    def check_overlap_is_on(self) -> None:
        """A fresh batch on the idle engine: every step but the first overlaps the one before."""
        before = self.engine.statistics.steps, self.engine.statistics.overlapped_steps
        for number in (100, 101):
            self.add(number, tokens=LONG)
        self.drain()
        steps = self.engine.statistics.steps - before[0]
        overlapped = self.engine.statistics.overlapped_steps - before[1]
        assert steps >= LONG
        assert overlapped == (steps - 1 if self.engine.lookahead else 0)
        assert self.firsts[100] == self.firsts[101] == 1


@pytest.fixture(params=[0, 1, 3])
def make_watched(make_tiny_engine: EngineFactory, request: Any) -> Callable[..., Watched]:
    """Engines of every lookahead on a late device."""

    def make(**settings: Any) -> Watched:
        engine = make_tiny_engine(lookahead=request.param, device=LateDevice(), **settings)
        return Watched(engine)

    return make


@pytest.mark.parametrize("evicts", [False, True], ids=["pause", "evict"])
def test_no_token_is_lost_or_doubled_by_memory_pressure(make_watched, expected, evicts: bool):
    """Break one of these, and it fails:

    - `release_request`: do not store `request.generated_tokens`
    - `update_requests`: `is_first=length <= slots.prompt_length[rows] + 1`
    - `_pause`: `slots.count_back(newly, 1)` besides
    - `_resume`: leave the state `PAUSED` (nobody is admitted any more)
    - `StepLoop.due`: all that is in flight (`return list(in_flight)`)
    """
    watched = make_watched(**CRAMPED, paused_buffer_size_gb=1e-9 if evicts else None)
    futures = [watched.add(number) for number in range(4)]
    watched.drain()
    engine = watched.engine
    requests = [future.result() for future in futures]
    assert [request.generated_tokens for request in requests] == expected
    assert [watched.emitted[number] for number in range(4)] == expected
    assert [watched.firsts[number] for number in range(4)] == [1] * 4
    assert engine.stats()["pauses"] > 0
    assert (engine.stats()["evictions"] > 0) or not evicts
    watched.check_overlap_is_on()


def phase(name: str) -> Callable[[DynamicInferenceEngine], bool]:
    """Whether request 2 is in a phase of its life."""

    def is_there(engine: DynamicInferenceEngine) -> bool:
        slots, request = engine.context.slots, engine.get_request(2)
        if request not in slots.requests:
            events = [event.type for event in request.events]
            return name == ("evicted" if DynamicInferenceEventType.EVICT in events else "waiting")
        slot = slots.requests.index(request)
        state = SlotState(int(slots.state[slot]))
        if state == SlotState.DECODING:
            booked = slots.num_known[slot] - slots.prompt_length[slot]
            return name == {0: "prompt in flight", 1: "first token"}.get(int(booked))
        return name == state.name.lower()

    return is_there


@pytest.mark.parametrize(
    "name", ["waiting", "prefilling", "prompt in flight", "first token", "paused", "evicted"]
)
def test_an_abort_leaves_no_counter_behind(make_watched, expected, name: str):
    """The aborted request comes again at once, in the same slot as a rule.

    Break one of these, and it fails:

    - `abort_request`: do not look among waiting requests (`self.context.waiting.remove`)
    - `abort_request`: `self.lookahead = 0` besides (overlap off for the rest of the run)
    """
    settings = {
        "waiting": {"max_requests": 2},
        "prefilling": {"max_tokens": 8},
        "paused": {"num_kv_blocks": 9, "block_size_tokens": 8},
        "evicted": {"num_kv_blocks": 9, "block_size_tokens": 8, "paused_buffer_size_gb": 1e-9},
    }.get(name, {})
    watched = make_watched(**settings)
    engine = watched.engine
    futures = [watched.add(number) for number in range(3)]
    if name == "prompt in flight" and not engine.lookahead:
        name = "first token"  # a serial engine has nothing in flight between two steps
    is_there = phase(name)
    while not is_there(engine):
        watched.step()
    engine.abort_request(2)
    assert futures[2].result().finish_reason == "aborted"
    assert futures[2].result().generated_tokens == watched.emitted[2]
    futures[2] = watched.add(2)
    watched.drain()
    assert [future.result().generated_tokens for future in futures] == expected[:3]
    assert [watched.emitted[number] for number in range(3)] == expected[:3]
    assert [watched.firsts[number] for number in range(3)] == [1] * 3
    watched.check_overlap_is_on()


def test_no_token_is_late(make_watched: Callable[..., Watched]) -> None:
    """A token is reported `lookahead` steps after its launch, and a request that joins a running
    batch is launched in the next step.

    Break one of these, and it fails:

    - `StepLoop.due`: `max(len(in_flight) - self.lookahead - 1, 0)`, one step too late
    - `_may_admit`: `return False` if `running.any()`, so that a newcomer waits
    """
    watched = make_watched()
    lookahead = watched.engine.lookahead
    watched.add(0)
    for _ in range(5):
        watched.step()
    assert len(watched.emitted[0]) == 5 - lookahead
    watched.add(1)
    for steps in range(1, 8):
        watched.step()
        assert len(watched.emitted[1]) == max(steps - lookahead, 0)
        assert len(watched.emitted[0]) == 5 + steps - lookahead
    watched.drain()
