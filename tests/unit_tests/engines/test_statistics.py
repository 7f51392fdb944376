"""Counters: which steps overlap, and what the ratio leaves out."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_async.contexts.batch_dimensions import BatchDimensions
from megatron_async.contexts.plan_builder import dummy_plan
from megatron_async.engines.statistics import EngineStatistics

PLAN = replace(
    dummy_plan(BatchDimensions(decode_rows=1, prefill_lengths=((5, 9),))),
    prefill_token_ids=np.zeros(5, dtype=np.int32),
)


def launch(statistics, *overlapped):
    for flag in overlapped:
        statistics.count_launch(PLAN, overlapped=flag)


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


def test_the_mapping():
    statistics = EngineStatistics()
    empty = statistics.as_dict(1, 0, 0)
    assert empty["overlap_ratio"] == empty["tokens_per_second"] == empty["cpu_us_per_step"] == 0
    launch(statistics, False, True)
    statistics.generated_tokens = 30
    statistics.prepare_ns, statistics.launch_ns, statistics.resolve_ns = 2000, 4000, 6000
    statistics.count_step_time(1.5, idle=True)
    found = statistics.as_dict(lookahead=3, pauses=4, evictions=5)
    assert found["steps"] == 2
    assert found["prefill_tokens"] == 10
    assert (found["lookahead"], found["pauses"], found["evictions"]) == (3, 4, 5)
    assert found["tokens_per_second"] == pytest.approx(20)
    assert found["cpu_us_per_step"] == pytest.approx(6)
    parts = ("prepare_us_per_step", "launch_us_per_step", "resolve_us_per_step")
    assert sum(found[part] for part in parts) == pytest.approx(6)
