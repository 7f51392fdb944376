"""Bugs of the kinds that async engines have, planted one at a time to see that they are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine
from megatron_async.contexts.bookkeeping_buffer import HostStaging
from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

Plant = Callable[[pytest.MonkeyPatch], None]


def one_staging_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory changes while a copy from it is in flight."""
    make = HostStaging.__init__

    def make_of_one_buffer(staging: HostStaging, *args: Any) -> None:
        make(staging, *args)
        staging._tensors = staging._tensors[:1] * len(staging._tensors)
        staging._arrays = staging._arrays[:1] * len(staging._arrays)

    monkeypatch.setattr(HostStaging, "__init__", make_of_one_buffer)


def one_sample_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that nobody has read are written over."""
    make = TextGenerationController.__init__

    def make_with_short_ring(controller: TextGenerationController, *args: Any) -> None:
        make(controller, *args)
        del controller._ring[1:]

    monkeypatch.setattr(TextGenerationController, "__init__", make_with_short_ring)


def no_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot changes hands without a trace, and rows in flight are booked to its next owner."""
    release = RequestSlots.release

    def release_without_trace(slots: RequestSlots, slot: int) -> Any:
        blocks = release(slots, slot)
        slots.generation[slot] -= 1
        return blocks

    monkeypatch.setattr(RequestSlots, "release", release_without_trace)


def one_block_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is evicted keeps its last block's place in the table of its slot: the next
    owner writes to a block that is free."""
    admit = DynamicInferenceContext._admit

    def admit_with_a_stale_block(context: DynamicInferenceContext, micro_batch: int) -> int:
        waiting = context.waiting.first()
        slot = admit(context, micro_batch)
        if waiting.request.generated_tokens and context.slots.num_blocks[slot] > 1:
            slots, updates = context.slots, context._plan_builder._updates
            last = slots.num_blocks[slot] - 1
            slot_ids, indices, blocks = updates[-1]
            updates[-1] = (slot_ids[:-1], indices[:-1], blocks[:-1])
            assert indices[-1] == last
        return slot

    monkeypatch.setattr(DynamicInferenceContext, "_admit", admit_with_a_stale_block)


def last_token_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is evicted forgets its last token, and says it again."""
    evict = DynamicInferenceContext._evict

    def evict_too_much(context: DynamicInferenceContext, slot: int) -> None:
        request = context.slots.request_at(slot)
        evict(context, slot)
        del request.generated_tokens[-1:]

    monkeypatch.setattr(DynamicInferenceContext, "_evict", evict_too_much)


def serial_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort turns overlap off for the rest of the run."""
    abort = DynamicInferenceEngine.abort_request

    def abort_and_slow_down(engine: DynamicInferenceEngine, request_id: int) -> None:
        abort(engine, request_id)
        engine.lookahead = 0

    monkeypatch.setattr(DynamicInferenceEngine, "abort_request", abort_and_slow_down)


def pending_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is resumed counts a sample that nobody has launched: it ends one token short
    and waits for a sample that never comes."""
    resume = DynamicInferenceContext._resume

    def resume_and_count(context: DynamicInferenceContext, rows: Any) -> None:
        paused = rows[context.slots.state[rows] == 3]
        resume(context, rows)
        context.slots.num_launched[paused] += 1

    monkeypatch.setattr(DynamicInferenceContext, "_resume", resume_and_count)


def stale_sampling_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed of a slot's last owner stays."""
    set_sampling = RequestSlots._set_sampling

    def set_without_seed(slots: RequestSlots, slot: int, params: Any, seed: int) -> None:
        set_sampling(slots, slot, params, int(slots.seed[slot]) or seed)

    monkeypatch.setattr(RequestSlots, "_set_sampling", set_without_seed)


def a_reader_misses_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was booked in the step that ended a request is not streamed."""
    booked = DynamicInferenceEngine._booked_tokens

    def booked_while_it_runs(engine: DynamicInferenceEngine, request: Any) -> list[int]:
        tokens = booked(engine, request)
        return tokens if request.finish_reason is None else tokens[:-1]

    monkeypatch.setattr(DynamicInferenceEngine, "_booked_tokens", booked_while_it_runs)


BUGS: list[Plant] = [
    one_staging_buffer,
    one_sample_buffer,
    no_generations,
    one_block_too_few,
    last_token_twice,
    serial_after_an_abort,
    pending_for_ever,
    stale_sampling_parameters,
    a_reader_misses_the_end,
]
