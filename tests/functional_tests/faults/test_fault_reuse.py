"""Blocks, slots and rows change hands while steps that use them are in flight.

Freed blocks hold NaN (`poison.py`), so that a read shows in the logits and a write by
somebody who is not their owner is found out.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.devices import Chaos, CpuDevice, Device
from tests.support.harness import assert_all_is_back, drain, greedy, make_engine, random_prompts
from tests.support.late_device import LateDevice
from tests.support.poison import poison_blocks

TOKENS = 20
PROMPTS = random_prompts(41, (6, 17, 11, 4, 25, 9))
CRAMPED = {
    "num_kv_blocks": 24,
    "block_size_tokens": 2,
    "max_requests": 4,
    "max_tokens": 9,
    "max_sequence_length": 48,
}
DEVICES = ["late", "chaotic"]


def device(kind: str) -> Device:
    if kind == "late":
        return LateDevice()
    return CpuDevice(Chaos(5, probability=0.3, max_delay_s=0.0005))


def watch_logits(engine: DynamicInferenceEngine) -> None:
    """A step fails that computes a logit which is not finite. (When a step is launched, all its
    rows are live, and what it reads is theirs until it has run.)"""
    wrapped = engine.controller.inference_wrapped_model
    forward = wrapped.forward

    def watched(view: ContextGPUView) -> torch.Tensor:
        logits = forward(view)
        assert logits.isfinite().all(), "a live row read a block that nobody owns"
        return logits

    wrapped.forward = watched  # type: ignore[method-assign]


@pytest.fixture
def poisoned_engines(tiny_model: torch.nn.Module) -> Iterator[Any]:
    """`make(kind of device, **settings)`; closed after the test, and no free block was written."""
    engines = []

    def make(kind: str, **settings: Any) -> DynamicInferenceEngine:
        # Without the integrity check, which would find some of the bugs before the poison does.
        engine = make_engine(
            tiny_model, device=device(kind), check_integrity=False, **{**CRAMPED, **settings}
        )
        watch_logits(engine)
        engines.append((engine, poison_blocks(engine)))
        return engine

    yield make
    for engine, blocks in engines:
        assert_all_is_back(engine)
        blocks.check_free_blocks()
        done = engine.context.device.event()
        engine.context.device.compute.record(done)
        done.wait()
        engine.close()


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("evicts", [False, True], ids=["pauses", "evicts"])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_blocks_change_hands(poisoned_engines, expected, lookahead, evicts: bool, kind: str):
    """Requests pause, are evicted, end by a stop token and are aborted, with steps in flight.

    Break one of these, and it fails:

    - `_schedule_decode`: do not take `starved` out of `rows` (no `setdiff1d`)
    - `_give_blocks`: no `add_block_updates`
    - `_admit`: no `add_block_updates`
    - `TorchPagedAttention._begin_decode`: `index` instead of `index[:, :1]` where not `valid`
    """
    limit = 1e-9 if evicts else None
    engine = poisoned_engines(kind, lookahead=lookahead, paused_buffer_size_gb=limit)
    stop = expected[3][7]
    params = [greedy(TOKENS)] * 6
    params[3] = greedy(TOKENS, stop_token_ids=[stop])
    futures = [engine.add_request(i, PROMPTS[i], params[i]) for i in range(6)]
    for steps, victim in ((9, 1), (12, 4)):
        for _ in range(steps):
            engine.step_modern()
        engine.abort_request(victim)
        futures[victim] = engine.add_request(victim, PROMPTS[victim], params[victim])
    drain(engine)
    until_stop = expected[3][: expected[3].index(stop) + 1]
    found = [future.result() for future in futures]
    assert [request.error for request in found] == [None] * 6
    assert [r.generated_tokens for r in found] == [*expected[:3], until_stop, *expected[4:]]
    assert engine.stats()["pauses"] > 0
    assert (engine.stats()["evictions"] > 0) or not evicts


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("lookahead", [0, 2])
def test_an_abort_in_the_middle_of_a_prompt(poisoned_engines, expected, lookahead, kind: str):
    """Break `release_request`: leave the slot in `_prefilling`, so that chunks of a request that is
    gone go on being written."""
    engine = poisoned_engines(
        kind, lookahead=lookahead, max_requests=2, enable_prefix_caching=False
    )
    other = engine.add_request(0, PROMPTS[0], greedy(TOKENS))
    for number in range(1, 6):
        engine.add_request(number, PROMPTS[4], greedy(TOKENS))
        for _ in range(2):
            engine.step_modern()
        assert engine.context.scheduler.prefilling
        engine.abort_request(number)
    last = engine.add_request(1, PROMPTS[1], greedy(TOKENS))
    drain(engine)
    assert other.result().generated_tokens == expected[0]
    assert last.result().generated_tokens == expected[1]


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_slot_changes_hands_with_rows_in_flight(poisoned_engines, expected, lookahead, kind: str):
    """There is one slot, so each request takes over the slot of the one before.

    Break one of these, and it fails:

    - `RequestSlots.release`: no `self.generation[slot] += 1`
    - `update_requests`: `live = plan.produces`, without `held`
    """
    engine = poisoned_engines(kind, lookahead=lookahead, max_requests=1)
    emitted: dict[int, list[int]] = {}
    futures = {}
    for number, prompt in enumerate(PROMPTS):
        futures[number] = engine.add_request(number, prompt, greedy(TOKENS))
    while engine.has_unfinished_requests():
        for output in engine.step_modern()["outputs"]:
            for request_id, token in zip(output.token_request_ids, output.tokens):
                emitted.setdefault(int(request_id), []).append(int(token))
        for number in (0, 2, 4):  # aborted as soon as they have said something
            if number in emitted and not futures[number].done():
                engine.abort_request(number)
    for number, future in futures.items():
        tokens = future.result().generated_tokens
        assert tokens == emitted[number]
        assert tokens == expected[number][: len(tokens)]
        assert (len(tokens) == TOKENS) == (number % 2 == 1)
    assert engine.stats()["zombie_rows"] >= 3 * lookahead
