"""Random schedules of calls give the serial answers; planted bugs are found.

More schedules than CI plays, and others:

    export MEGATRON_ASYNC_FUZZ_SCHEDULES=50000 MEGATRON_ASYNC_FUZZ_SEED=100
    pytest tests/functional_tests/fuzz -k answers

In the bit-stable mode answers are compared to the bit (tests/unit_tests/ops/test_fuzz_in_mode.py).

Planted bugs (`planted_bugs.py`, `planted_state_bugs.py`) and the
schedule that found them, each with serial answers of its own:

    a buffer changes under a copy      one_staging_buffer 2, one_sample_buffer 6,
                                       bookkeeping_thought_there 6
    rows and blocks are reused         no_generations 6, one_block_too_few 5
    counters, and what they count      last_token_twice 5, pending_for_ever 5
    overlap is silently off            serial_after_an_abort 6
    state of a slot's last owner       stale_sampling_parameters 6, length_of_the_last_owner 6
    streams                            a_reader_misses_the_end 8
    blocks of drafts                   blocks_for_one_token 6, drafts_without_blocks 11,
                                       surplus_and_one_more 5
    verification of drafts             drafts_believed 9, one_draft_too_many 9,
                                       one_token_less_at_a_border 6
    drafts that are looked up          drafts_of_the_last_owner 12, a_match_with_itself 12
    an MTP layer                       hidden_states_are_not_kept 5, drafts_have_no_places 5,
                                       entries_of_rejected_drafts 9,
                                       entries_of_repeated_tokens 8
    shared blocks                      starts_at_zero_alone 5, shared_blocks_are_freed 7,
                                       shared_blocks_are_written 12,
                                       repeated_tokens_read_the_dummy 4,
                                       repeated_tokens_one_further 12,
                                       blocks_entered_too_early 2, lost_blocks_are_found 4
    routing records                    routing_of_rejected_drafts 9,
                                       routing_of_another_writer 11,
                                       routing_is_gathered_too_late 6
    recurrent states                   state_of_the_last_owner 6, short_chunks_forget 6,
                                       drafts_are_flushed 9, snapshot_of_the_wrong_chunk 10,
                                       snapshot_without_inputs 5,
                                       snapshot_behind_its_tokens 13,
                                       snapshot_in_use_is_given_away 13,
                                       states_without_blocks 5
    weights that change                a_version_one_step_late 6, hits_across_epochs 6,
                                       weights_change_at_once 6, half_a_prompt_of_old_weights 9
    requests that move                 moved_one_place_on 7, a_span_that_is_left_behind 7
    steps that fail for ever           test_endless_failures_are_found 58
    a stop beside shared experts       test_overwritten_samples_are_found 4
    blocks before a window             a_block_one_step_early 2, a_window_from_at_most 5
    an interrupt in a step             interrupts_are_not_held 5, half_booked_tokens_stay 5,
                                       books_are_not_mended 5
"""

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import run_state_machine_as_test

from megatron_async.engine.step_loop import StepLoop
from megatron_async.text import structured_output
from tests.functional_tests.fuzz.engine_machine import EngineMachine
from tests.functional_tests.fuzz.fuzz_requests import MAX_SEQUENCE, Ask
from tests.functional_tests.fuzz.other_machines import (
    ExpertMachine,
    FailingMachine,
    InterruptedMachine,
    NarrowMachine,
    SleepingMachine,
    WindowMachine,
)
from tests.functional_tests.fuzz.updating_machine import MovingMachine, UpdatingMachine
from tests.support.planted_bugs import BUGS, MOVE_BUGS, UPDATE_BUGS, Plant
from tests.support.planted_state_bugs import INTERRUPT_BUGS, SLEEP_BUGS
from tests.support.planted_window_bugs import WINDOW_BUGS
from tests.support.tiny_launches import use_small_grid

SCHEDULES = int(os.environ.get("MEGATRON_ASYNC_FUZZ_SCHEDULES", "160"))
FIRST_SEED = int(os.environ.get("MEGATRON_ASYNC_FUZZ_SEED", "0"))
FAILING_SCHEDULES = SCHEDULES // 2
TESTS = 1
CALLS = 12
"""Calls of a schedule, before its requests run to their ends."""
ENOUGH = 20
"""Schedules in which a planted bug is to be found. Hypothesis begins a run of many schedules with
short ones, in which few bugs show."""
MANY = 1000
"""Schedules in which a bug that needs a rare event is to be found."""
SEEDS = {
    "bookkeeping_thought_there": 1, "one_block_too_few": 2, "last_token_twice": 2,
    "pending_for_ever": 2, "blocks_for_one_token": 2, "drafts_without_blocks": 4,
    "drafts_believed": 1, "one_draft_too_many": 1, "surplus_and_one_more": 2,
    "starts_at_zero_alone": 2, "lost_blocks_are_found": 3, "one_token_less_at_a_border": 2,
    "hidden_states_are_not_kept": 4, "drafts_have_no_places": 4, "entries_of_rejected_drafts": 1,
    "drafts_are_flushed": 1, "snapshot_of_the_wrong_chunk": 5, "snapshot_without_inputs": 3,
    "snapshot_behind_its_tokens": 1, "snapshot_in_use_is_given_away": 1,
    "states_without_blocks": 3, "repeated_tokens_read_the_dummy": 5,
    "entries_of_repeated_tokens": 4,
}  # fmt: skip
"""Bugs that seed 0 does not find so soon: a seed that does."""
RARE = {"drafts_of_the_last_owner": 18, "a_match_with_itself": 18}
"""Bugs that need a rare event: a seed that has it soon."""


@pytest.fixture(autouse=True)
def close_engines() -> None:
    """Machines close theirs; the one that gives the serial answers serves the next test, too."""


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request ends by the time that its grammar takes: it would not be the same the next
    time."""
    monkeypatch.setattr(structured_output, "ALLOWANCE_S", 60.0)


@pytest.fixture(autouse=True)
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed plays the same schedules in every process. By default Hypothesis also draws numbers
    that stand in the code of modules, and which ones are imported depends on the tests before."""
    monkeypatch.setattr(providers, "_get_local_constants", providers.Constants)
    providers.CONSTANTS_CACHE.cache.clear()


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences pass as many borders of states as long ones do."""
    use_small_grid(monkeypatch.setattr)


def fuzz(
    schedules: int, first_seed: int, *phases: Phase, machine: type[EngineMachine] = EngineMachine
) -> None:
    """Play random schedules until one fails; with `Phase.shrink`, shrink that one."""
    run_state_machine_as_test(
        seed(first_seed)(lambda: machine()),
        settings=settings(
            max_examples=schedules,
            stateful_step_count=CALLS,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def counts_of(schedules: int, first_seed: int, machine: type[EngineMachine]) -> Counter[str]:
    """What happened in random schedules, none of which failed."""
    before = EngineMachine.counts.copy()
    fuzz(schedules, first_seed, Phase.generate, Phase.shrink, machine=machine)
    return EngineMachine.counts - before


@pytest.mark.slow
@pytest.mark.timeout(600 + SCHEDULES)
@pytest.mark.parametrize("part", range(TESTS))
def test_random_schedules_give_the_serial_answers(part: int) -> None:
    counts = counts_of(SCHEDULES // TESTS, FIRST_SEED + part, EngineMachine)
    # The schedules are worth their name.
    assert counts["schedules"] >= SCHEDULES // TESTS
    wanted = ("pauses", "evictions", "zombie_rows", "readers", "aborted", "grammar")
    wanted += ("accepted_tokens", "ngram_drafts", "mtp_drafts", "prefix_cache_hits")
    wanted += tuple(EngineMachine.models)
    missing = [event for event in wanted if not counts[event]]
    # Draws of one seed are alike, so a part may lack two; planted bugs show that each is alive.
    assert len(missing) <= 2, (missing, counts)
    assert counts["overlapped_steps"] > counts["steps"] / 3, counts  # serial engines among them


def test_an_abort_before_a_late_launch() -> None:
    """The only request goes while the launch of its next step waits. Break it, and it fails:
    `abort_request_during_async_step` does not look again what the step finds."""
    machine, before = EngineMachine(), EngineMachine.counts.copy()
    config = {
        "lookahead": 1, "late_launch": True, "max_requests": 3, "max_tokens": 3,
        "block_size_tokens": 2, "num_kv_blocks": 22, "num_speculative_tokens": 0,
        "invalidation": "reconcile", "max_sequence_length": MAX_SEQUENCE,
    }  # fmt: skip
    ask = Ask(0, [24], {"num_tokens_to_generate": 5}, 0)
    machine.new_engine(config, "", False, {}, "AttentionModel", [ask])
    for _ in range(3):
        machine.async_step()
    machine.abort_request_during_async_step(0)
    machine.teardown()
    assert (EngineMachine.counts - before)["aborts_before_a_launch"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_that_fail_end_their_requests_alone() -> None:
    counts = counts_of(FAILING_SCHEDULES, FIRST_SEED, FailingMachine)
    # The schedules are worth their name.
    assert min(counts["failed_steps"], counts["error"], counts["length"]) > FAILING_SCHEDULES / 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupted_steps_change_no_token() -> None:
    counts = counts_of(FAILING_SCHEDULES // 2, FIRST_SEED, InterruptedMachine)
    # The schedules are worth their name.
    assert min(counts["signals"], counts["raised"]) > FAILING_SCHEDULES / 10


@pytest.mark.parametrize("plant", INTERRUPT_BUGS, ids=lambda plant: plant.__name__)
def test_a_bug_of_interrupts_is_found(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    monkeypatch.setattr(EngineMachine, "answers", {})
    plant(monkeypatch)
    before = EngineMachine.counts["schedules"]
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError)) as failure:
        fuzz(ENOUGH, SEEDS.get(plant.__name__, 1), Phase.generate, machine=InterruptedMachine)
    number = EngineMachine.counts["schedules"] - before
    print(f"{plant.__name__} is found by schedule {number}: {failure.value!r}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights_that_change_under_way() -> None:
    counts = counts_of(FAILING_SCHEDULES, FIRST_SEED, UpdatingMachine)
    # The schedules are worth their name.
    policies = [counts[f"update: {policy}"] for policy in ("keep", "recompute", "abort")]
    several = counts["requests of several versions"]
    assert min(*policies, several, counts["torn"]) > FAILING_SCHEDULES / 20, counts
    assert counts["weight_update"] > 0, counts


@pytest.mark.parametrize("plant", UPDATE_BUGS, ids=lambda plant: plant.__name__)
def test_a_bug_of_updates_is_found(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    monkeypatch.setattr(UpdatingMachine, "answers", {})
    plant(monkeypatch)
    before = EngineMachine.counts["schedules"]
    with pytest.raises((AssertionError, RuntimeError)) as failure:
        fuzz(ENOUGH, SEEDS.get(plant.__name__, 2), Phase.generate, machine=UpdatingMachine)
    number = EngineMachine.counts["schedules"] - before
    print(f"{plant.__name__} is found by schedule {number}: {failure.value!r}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_that_move_say_what_they_would_have_said() -> None:
    counts = counts_of(FAILING_SCHEDULES // 2, FIRST_SEED, MovingMachine)
    # The schedules are worth their name.
    assert min(counts["moved with tokens"], counts["requests of several versions"]) > 0, counts


@pytest.mark.parametrize("plant", MOVE_BUGS, ids=lambda plant: plant.__name__)
def test_a_bug_of_moves_is_found(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    monkeypatch.setattr(UpdatingMachine, "answers", {})
    plant(monkeypatch)
    before = EngineMachine.counts["schedules"]
    with pytest.raises((AssertionError, RuntimeError)) as failure:
        fuzz(ENOUGH, SEEDS.get(plant.__name__, 3), Phase.generate, machine=MovingMachine)
    number = EngineMachine.counts["schedules"] - before
    print(f"{plant.__name__} is found by schedule {number}: {failure.value!r}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stops_beside_shared_experts_change_no_token() -> None:
    counts = counts_of(FAILING_SCHEDULES, FIRST_SEED, ExpertMachine)
    # The schedules are worth their name.
    assert min(counts["stopped_steps"], counts["steps_for_others"]) > FAILING_SCHEDULES / 10


def test_overwritten_samples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that such schedules were made for: a stop ran a step for others while all buffers
    of samples were in use."""

    def drain(loop: StepLoop) -> None:
        loop.group.stop_together(True)
        while loop.group.must_keep_up:
            loop.launch_dummy()
            loop.resolve_down_to(loop.lookahead)
        loop.resolve_down_to(0)

    monkeypatch.setattr(StepLoop, "drain", drain)
    monkeypatch.setattr(EngineMachine, "answers", {})
    before = EngineMachine.counts["schedules"]
    with pytest.raises((AssertionError, KeyError)):
        fuzz(ENOUGH, 2, Phase.generate, machine=ExpertMachine)
    print(f"found by schedule {EngineMachine.counts['schedules'] - before}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_that_goes_and_comes_changes_no_token() -> None:
    counts = counts_of(FAILING_SCHEDULES // 4, FIRST_SEED, SleepingMachine)
    # The schedules are worth their name.
    assert min(counts["copied"], counts["freed"]) > FAILING_SCHEDULES / 10, counts


@pytest.mark.timeout(600)
def test_keys_and_values_in_fp8_have_the_serial_answers() -> None:
    counts = counts_of(FAILING_SCHEDULES // 2, FIRST_SEED, NarrowMachine)
    # The schedules are worth their name.
    for name in ("evictions", "prefix_cache_hits", "accepted_tokens", "zombie_rows"):
        assert counts[name] > 0, counts


@pytest.mark.timeout(600)
def test_models_with_windows_have_the_serial_answers() -> None:
    counts = counts_of(FAILING_SCHEDULES // 2, FIRST_SEED, WindowMachine)
    # The schedules are worth their name.
    for name in ("prefix_cache_evictions", "prefix_cache_hits", "accepted_tokens"):
        assert counts[name] > 0, counts


@pytest.mark.parametrize("plant", WINDOW_BUGS, ids=lambda plant: plant.__name__)
def test_a_bug_of_windows_is_found(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    monkeypatch.setattr(WindowMachine, "answers", {})
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)) as failure:
        fuzz(ENOUGH, SEEDS.get(plant.__name__, 0), Phase.generate, machine=WindowMachine)
    print(f"{plant.__name__} is found: {failure.value!r}")


@pytest.mark.parametrize("plant", SLEEP_BUGS, ids=lambda plant: plant.__name__)
def test_a_bug_of_memory_is_found(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    monkeypatch.setattr(EngineMachine, "answers", {})
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)) as failure:
        fuzz(ENOUGH, SEEDS.get(plant.__name__, 0), Phase.generate, machine=SleepingMachine)
    print(f"{plant.__name__} is found: {failure.value!r}")


def test_endless_failures_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The livelock that such schedules were made for: steps launched while those behind a failed
    one are in flight."""
    monkeypatch.setattr(StepLoop, "is_recovering", False)
    with pytest.raises(AssertionError, match=r"stuck|forgotten"):
        fuzz(MANY, 0, Phase.generate, machine=FailingMachine)


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    # A bug spoils serial engines and their answers too: the next bug must not be found by that.
    monkeypatch.setattr(EngineMachine, "answers", {})
    plant(monkeypatch)
    name, before = plant.__name__, EngineMachine.counts["schedules"]
    schedules, first_seed = (MANY, RARE[name]) if name in RARE else (ENOUGH, SEEDS.get(name, 0))
    with pytest.raises((AssertionError, RuntimeError)) as failure:
        fuzz(schedules, first_seed, Phase.generate)
    number = EngineMachine.counts["schedules"] - before
    print(f"{name} is found by schedule {number}: {failure.value!r}")
