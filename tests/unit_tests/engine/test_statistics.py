"""Counters: which steps overlap and why others do not, stage times, and what `stats()` says."""

from pathlib import Path

import numpy as np
import pytest

from megatron_async import SamplingParams
from megatron_async.devices import Chaos, CpuDevice
from megatron_async.observe.statistics import (
    BOUNDS_NS,
    EngineStatistics,
    NoOverlapReason,
    TimeHistogram,
)
from tests.unit_tests.engine.engines_under_test import GREEDY, PROMPTS


def launch(statistics, *overlapped, lookahead=1):
    for flag in overlapped:
        statistics.count_launch(2, 5, False, flag, lookahead)


def reasons(engine):
    """The reasons that occurred, and how often; they must explain every step."""
    statistics = engine.statistics
    assert sum(statistics.no_overlap.values()) + statistics.overlapped_steps == statistics.steps
    return {str(reason): count for reason, count in statistics.no_overlap.items() if count}


def test_the_first_step_of_a_burst_is_left_out():
    statistics = EngineStatistics()
    assert statistics.overlap_ratio == 0
    launch(statistics, False, True, True)
    assert statistics.overlap_ratio == 1.0
    statistics.count_step_time(0.5, idle=True)
    launch(statistics, False)
    assert statistics.overlap_ratio == 1.0
    statistics.count_step_time(0.5, idle=False)
    launch(statistics, False)  # work was left, so this one could have overlapped
    assert statistics.overlap_ratio == 2 / 3


def test_a_note_counts_for_the_next_launch_alone_and_the_first_one_wins():
    statistics = EngineStatistics(idle=False)
    statistics.note_no_overlap(NoOverlapReason.NOTHING_TO_PLAN)
    statistics.note_no_overlap(NoOverlapReason.INTERRUPTED)
    launch(statistics, False)
    statistics.note_no_overlap(NoOverlapReason.NOTHING_TO_PLAN)
    launch(statistics, True, False)  # some were in flight after all; the next one is unexplained
    assert statistics.no_overlap[NoOverlapReason.NOTHING_TO_PLAN] == 1
    assert statistics.no_overlap[NoOverlapReason.INTERRUPTED] == 1


def test_reasons_of_a_serial_engine(make_engine):
    engine = make_engine(lookahead=0)
    for _ in range(2):
        engine.generate(PROMPTS, GREEDY)
    assert reasons(engine) == {"after_idle": 2, "serial": 2 * 11}


@pytest.mark.parametrize("lookahead", [1, 2])
def test_reasons_of_an_engine_that_waits_for_blocks(make_engine, lookahead):
    """Two sequences that fill the pool alone: the second must wait until the first has ended."""
    engine = make_engine(lookahead=lookahead, num_kv_blocks=2)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=15, termination_id=-1)
    engine.generate([[1] * 17, [2] * 17], params)
    assert reasons(engine) == {"after_idle": 1, "nothing_to_plan": 1}
    assert engine.stats()["overlapped_steps"] == 2 * 14


@pytest.mark.parametrize("seed", range(6))
def test_every_step_has_its_reason_under_chaos(make_engine, seed):
    random = np.random.default_rng(seed)
    device = CpuDevice(Chaos(seed, probability=0.3, max_delay_s=0.001))
    engine = make_engine(
        device=device, lookahead=seed % 3, num_kv_blocks=9, block_size_tokens=4, max_requests=3
    )
    added = 0
    while added < 12 or engine.has_unfinished_requests():
        if added < 12 and random.random() < 0.3:
            tokens = SamplingParams(
                temperature=0.0,
                num_tokens_to_generate=int(random.integers(1, 14)),
                stop_token_ids=random.integers(512, size=40).tolist(),
            )
            engine.add_request(added, random.integers(512, size=random.integers(1, 16)), tokens)
            added += 1
            if random.random() < 0.2:
                engine.abort_request(int(added - 1))
        engine.step_modern()
        reasons(engine)
    found = reasons(engine)
    assert found["after_idle"] == engine.statistics.first_steps > 0
    assert ("serial" in found) == (seed % 3 == 0)
    stats = engine.stats()
    assert stats["finished_requests"] + stats["failed_requests"] == 12
    assert stats["kv_blocks_in_use"] == stats["slots_in_use"] == stats["waiting_requests"] == 0
    assert 0 < stats["kv_blocks_in_use_peak"] <= stats["kv_blocks"] == 9
    assert 0 < stats["slots_in_use_peak"] <= stats["slots"] == 3


def test_occupancy_now_and_at_its_peak(make_engine):
    engine = make_engine(max_requests=2, num_kv_blocks=8, block_size_tokens=16)
    for number, prompt in enumerate(([1] * 40, [2] * 17, [3])):
        engine.add_request(number, prompt, GREEDY)
    engine.step_modern()
    stats = engine.stats()
    assert (stats["kv_blocks_in_use"], stats["slots_in_use"], stats["waiting_requests"]) == (
        5,
        2,
        1,
    )
    engine.abort_request(0)
    stats = engine.stats()
    assert (stats["kv_blocks_in_use"], stats["slots_in_use"]) == (2, 1)
    assert (stats["kv_blocks_in_use_peak"], stats["slots_in_use_peak"]) == (5, 2)
    assert (stats["aborted_requests"], stats["failed_requests"]) == (1, 1)
    while engine.has_unfinished_requests():
        engine.step_modern()


def test_tokens_computed_again_after_an_eviction(make_engine):
    """Each of two sequences needs all blocks in the end: the later one is evicted, once."""
    engine = make_engine(lookahead=0, num_kv_blocks=4, block_size_tokens=4)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=8, termination_id=-1)
    engine.add_request(0, [1] * 7, params)
    late = engine.add_request(1, [2] * 7, params)
    known = None
    while engine.has_unfinished_requests():
        engine.step_modern()
        if engine.context.scheduler.evictions and known is None:
            known = 7 + len(engine.get_request(1).generated_tokens)
            assert engine.stats()["recomputed_tokens"] == 0  # it waits
    stats = engine.stats()
    # The last token had not been fed back, so it is computed for the first time.
    assert (stats["evictions"], stats["recomputed_tokens"]) == (1, known - 1)
    assert stats["prefill_tokens"] == 7 + 7 + known
    assert len(late.result().generated_tokens) == 8


def test_a_step_of_zombies_alone_is_discarded(make_engine):
    engine = make_engine(lookahead=1)
    engine.generate([[1, 2, 3]], GREEDY)
    assert engine.stats()["zombie_steps"] == 0
    engine.add_request(5, [1, 2, 3], GREEDY)
    for _ in range(3):
        engine.step_modern()
    engine.abort_request(5)  # one step is in flight
    engine.step_modern()
    stats = engine.stats()
    assert (stats["zombie_steps"], stats["zombie_rows"]) == (1, 1)


def test_histogram_of_times():
    times = TimeHistogram()
    assert times.percentile_us(0.5) == 0
    for microseconds in (0, 1, 100, 100, 100, 3000):
        times.add(microseconds * 1000)
    assert times.count == 6
    assert times.counts[0] == 2
    assert times.percentile_us(0.5) == pytest.approx(100, rel=0.25)
    assert times.percentile_us(1) == pytest.approx(3000, rel=0.42)
    times.add(10**12)  # longer than the last bound
    assert times.counts[-1] == 1
    assert times.percentile_us(1) == BOUNDS_NS[-1] / 1e3


@pytest.mark.parametrize("nanoseconds", [1023, 1024, 1448, 1449, 2048, 10**6, 2**34 - 1])
def test_a_time_lies_in_its_bucket(nanoseconds):
    times = TimeHistogram()
    times.add(nanoseconds)
    bucket = times.counts.index(1)
    assert nanoseconds <= BOUNDS_NS[bucket]
    assert bucket == 0 or nanoseconds >= BOUNDS_NS[bucket - 1]


def test_the_mapping(make_engine):
    engine = make_engine(lookahead=2)
    empty = engine.stats()
    assert empty["overlap_ratio"] == empty["tokens_per_second"] == empty["cpu_us_per_step"] == 0
    assert empty["step_us_p99"] == 0
    statistics = engine.statistics
    launch(statistics, False, True)
    statistics.generated_tokens = 30
    statistics.prepare_ns, statistics.launch_ns, statistics.resolve_ns = 2000, 4000, 6000
    statistics.count_step_time(1.5, idle=True)
    engine.context.scheduler.pauses, engine.context.scheduler.evictions = 4, 5
    found = engine.stats()
    assert found["steps"] == 2
    assert found["prefill_tokens"] == 10
    assert (found["lookahead"], found["pauses"], found["evictions"]) == (2, 4, 5)
    assert found["tokens_per_second"] == pytest.approx(20)
    assert found["cpu_us_per_step"] == pytest.approx(6)
    parts = ("prepare_us_per_step", "launch_us_per_step", "resolve_us_per_step")
    assert sum(found[part] for part in parts) == pytest.approx(6)
    assert found["step_us_p50"] == pytest.approx(1.5e6, rel=0.42)
    assert all(isinstance(value, int | float) for value in found.values())


def test_every_name_is_documented(make_engine):
    manual = (Path(__file__).parents[3] / "docs" / "observing.md").read_text("utf-8")
    missing = [name for name in make_engine().stats() if f"`{name}`" not in manual]
    assert missing == []
