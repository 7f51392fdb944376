"""Random schedules on a device with random delays give the serial result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import EngineFactory
from schedules import wrong_results

from megatron_async.contexts.bookkeeping_buffer import HostStaging
from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.devices.cpu import CpuStream
from megatron_async.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

SCHEDULES = 100
SCHEDULES_A_TEST = 20


@pytest.mark.parametrize("first", range(0, SCHEDULES, SCHEDULES_A_TEST))
def test_chaos_gives_the_serial_result(
    tiny_model: torch.nn.Module, make_tiny_engine: EngineFactory, first: int
) -> None:
    serial_engine = make_tiny_engine(lookahead=0, max_requests=16)
    counts: Counter[str] = Counter()
    for seed in range(first, first + SCHEDULES_A_TEST):
        assert wrong_results(tiny_model, serial_engine, seed, counts) == []
    # The schedules are worth their name.
    for event in ("pauses", "evictions", "zombie_rows", "aborted"):
        assert counts[event] > 0, counts
    assert counts["overlapped"] == SCHEDULES_A_TEST


# ---- The tests above can fail: plant a bug, and chaos finds it --------------------------------


def no_wait_for_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy stream takes samples before they are there."""
    monkeypatch.setattr(CpuStream, "wait", lambda stream, event: None)


def no_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot looks the same in the hands of its next owner, so zombie rows are booked."""
    release = RequestSlots.release

    def release_without_trace(slots: RequestSlots, slot: int) -> Any:
        blocks = release(slots, slot)
        slots.generation[slot] -= 1
        return blocks

    monkeypatch.setattr(RequestSlots, "release", release_without_trace)


def one_staging_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next plan overwrites one that is still to be copied."""
    make = HostStaging.__init__

    def make_of_one_buffer(staging: HostStaging, *args: Any) -> None:
        make(staging, *args)
        ring = len(staging._tensors)
        staging._tensors = staging._tensors[:1] * ring
        staging._arrays = staging._arrays[:1] * ring

    monkeypatch.setattr(HostStaging, "__init__", make_of_one_buffer)


def one_sample_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step overwrites samples that nobody has read."""
    make = TextGenerationController.__init__

    def make_with_short_ring(controller: TextGenerationController, *args: Any) -> None:
        make(controller, *args)
        del controller._ring[1:]

    monkeypatch.setattr(TextGenerationController, "__init__", make_with_short_ring)


BUGS = [no_wait_for_the_samples, no_generations, one_staging_buffer, one_sample_buffer]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_chaos_finds_a_planted_bug(
    tiny_model: torch.nn.Module,
    make_tiny_engine: EngineFactory,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    serial_engine = make_tiny_engine(lookahead=0, max_requests=16)  # made without the bug
    plant(monkeypatch)
    found = []
    for seed in range(30):
        try:
            found += wrong_results(tiny_model, serial_engine, seed, Counter())
        except AssertionError as error:  # the integrity check was faster
            found.append(str(error))
        if found:
            break
    monkeypatch.undo()
    assert found
