"""Random schedules on a device with random delays give the serial result."""

from collections import Counter

import pytest

from megatron_async.devices.cpu import CpuStream
from tests.support.planted_bugs import Plant, no_generations, one_sample_buffer, one_staging_buffer
from tests.support.schedules import wrong_results

SCHEDULES = 60
SCHEDULES_A_TEST = 20


@pytest.mark.parametrize("first", range(0, SCHEDULES, SCHEDULES_A_TEST))
def test_chaos_gives_the_serial_result(tiny_model, make_tiny_engine, first: int):
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


BUGS: list[Plant] = [no_wait_for_the_samples, no_generations, one_staging_buffer, one_sample_buffer]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_chaos_finds_a_planted_bug(tiny_model, make_tiny_engine, monkeypatch, plant: Plant):
    serial_engine = make_tiny_engine(lookahead=0, max_requests=16)  # made without the bug
    plant(monkeypatch)
    found = []
    for seed in range(30):
        try:
            found += wrong_results(tiny_model, serial_engine, seed, Counter())
        except (AssertionError, RuntimeError) as error:
            # The integrity check was faster, or the device met an index of the torn bookkeeping.
            found.append(str(error))
        if found:
            break
    monkeypatch.undo()
    assert found
