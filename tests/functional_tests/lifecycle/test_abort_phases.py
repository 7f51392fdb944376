"""A request can be aborted in every phase of its life, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_async import DynamicInferenceEngine, Status
from megatron_async.errors import RequestAborted
from megatron_async.planning.request_slots import SlotState
from megatron_async.requests.inference_request import DynamicInferenceEventType
from tests.support.harness import TINY, EngineFactory, drain, greedy, random_prompts

VICTIM, OTHERS = 2, (0, 1)
TOKENS = 24
PROMPTS = random_prompts(21, (9, 14, 40), TINY.vocab_size)


def state(engine: DynamicInferenceEngine) -> SlotState | None:
    """Of the victim's slot; None while it has none."""
    slots, request = engine.context.slots, engine.get_request(VICTIM)
    if request not in slots.requests:
        return None
    return SlotState(int(slots.state[slots.requests.index(request)]))


def is_evicted(engine: DynamicInferenceEngine) -> bool:
    events = [event.type for event in engine.get_request(VICTIM).events]
    return state(engine) is None and DynamicInferenceEventType.EVICT in events


def booked(engine: DynamicInferenceEngine) -> int:
    slots, request = engine.context.slots, engine.get_request(VICTIM)
    return len(slots.generated_tokens(slots.requests.index(request)))


def is_finishing(engine: DynamicInferenceEngine) -> bool:
    """All its tokens are launched, the last of them in flight or about to be booked."""
    if state(engine) != SlotState.DECODING:
        return False
    slots = engine.context.slots
    slot = slots.requests.index(engine.get_request(VICTIM))
    return bool(slots.at_least(slot) >= slots.max_length[slot] - 1)


CRAMPED = {"num_kv_blocks": 9, "block_size_tokens": 8}
PHASES: dict[str, tuple[Callable[[DynamicInferenceEngine], bool], dict[str, float]]] = {
    "waiting": (lambda e: state(e) is None and e.stats()["steps"] > 2, {"max_requests": 2}),
    "prefilling": (lambda e: state(e) == SlotState.PREFILLING, {"max_tokens": 16}),
    "first token": (lambda e: state(e) == SlotState.DECODING and booked(e) <= 1, {}),
    "decoding": (lambda e: state(e) == SlotState.DECODING and booked(e) > 5, {}),
    "finishing": (is_finishing, {}),
    "paused": (lambda e: state(e) == SlotState.PAUSED, CRAMPED),
    "evicted": (is_evicted, CRAMPED | {"paused_buffer_size_gb": 1e-9}),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_abort(make_tiny_engine: EngineFactory, phase: str, lookahead: int) -> None:
    reached, settings = PHASES[phase]
    plain = make_tiny_engine(lookahead=0)
    expected = [r.generated_tokens for r in plain.generate(PROMPTS, greedy(TOKENS))]
    engine = make_tiny_engine(lookahead=lookahead, **settings)
    futures = [engine.add_request(i, PROMPTS[i], greedy(TOKENS)) for i in range(3)]
    while not reached(engine):
        engine.step_modern()
    engine.abort_request(VICTIM)
    victim = futures[VICTIM].result()
    assert victim.status == Status.FAILED
    assert isinstance(victim.error, RequestAborted)
    assert victim.generated_tokens == expected[VICTIM][: len(victim.generated_tokens)]
    with pytest.raises(KeyError):
        engine.abort_request(VICTIM)
    # The id is free at once, also while rows of its last owner are in flight.
    again = engine.add_request(VICTIM, PROMPTS[VICTIM], greedy(TOKENS))
    drain(engine)
    assert [futures[i].result().generated_tokens for i in OTHERS] == [expected[i] for i in OTHERS]
    assert again.result().generated_tokens == expected[VICTIM]
    with pytest.raises(KeyError):
        engine.abort_request(VICTIM)
