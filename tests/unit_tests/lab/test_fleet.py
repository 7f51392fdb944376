"""Fleets in virtual time: hits are those of the ids alone, and policies do what they say."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_async.config import InferenceConfig
from megatron_async.errors import RequestError
from megatron_async.lab.arrival_trace import LengthDistribution
from megatron_async.lab.device_times import MACHINES
from megatron_async.lab.fleets.fleet import simulate_fleet
from megatron_async.lab.fleets.session_traces import SessionKind, SessionTrace
from megatron_async.lab.fleets.traced_requests import TracedRequest, hit_ceiling
from megatron_async.lab.model_shape import ModelShape
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.serving.routing import POLICIES

SHAPE = ModelShape.of_architecture(DUMMY_SHAPES["smollm2-135m"], "bfloat16")
MACHINE = MACHINES["h200:smollm2-135m"]
KIND = SessionKind(
    shared_tokens=512,
    num_shared=2,
    turns=LengthDistribution(5, 12),
    first_tokens=LengthDistribution(60, 300),
    new_tokens=LengthDistribution(60, 300),
    output_tokens=LengthDistribution(12, 60),
    think_s=2.0,
    longest=2000,
)


def serve(trace, replicas=1, policy="prefix", **settings):
    config = {
        "num_kv_blocks": 8000, "block_size_tokens": 16, "max_sequence_length": 2048,
        "max_requests": 16, "max_tokens": 512, "enable_prefix_caching": True,
    }  # fmt: skip
    config = InferenceConfig(**{**config, **settings})
    return simulate_fleet(trace, SHAPE, config, MACHINE, replicas, POLICIES[policy]())


@pytest.mark.parametrize(("size", "lookahead"), [(16, 0), (16, 1), (64, 2), (256, 1)])
def test_a_pool_that_is_large_enough_reaches_the_ceiling(size, lookahead):
    """Answers too, as their tokens are those that the next prompts repeat."""
    trace = SessionTrace(KIND, 20.0, 120, seed=5)
    run = serve(trace, block_size_tokens=size, lookahead=lookahead)
    ceiling = hit_ceiling(trace, size)
    assert run.cached_tokens == ceiling.found_tokens
    assert run.prompt_tokens == ceiling.prompt_tokens
    assert run.hit_ratio == ceiling.found_ratio > 0.5
    assert run.counters["prefix_cache_hits"] == run.cached_tokens
    assert run.counters["prefill_tokens"] == run.prompt_tokens - run.cached_tokens


def test_a_small_pool_finds_less_and_no_cache_nothing():
    trace = SessionTrace(KIND, 20.0, 120, seed=5)
    large, small = serve(trace), serve(trace, num_kv_blocks=160)
    without = serve(trace, enable_prefix_caching=False)
    assert 0 < small.hit_ratio < 0.9 * large.hit_ratio
    assert small.counters["prefix_cache_evictions"] > 0 == large.counters["prefix_cache_evictions"]
    assert without.cached_tokens == 0
    mean = [run.figures()["ttft_ms"]["mean"] for run in (large, small, without)]
    assert mean == sorted(mean)


def test_policies():
    trace = SessionTrace(KIND, 60.0, 240, seed=2)
    runs = {name: serve(trace, 4, name) for name in POLICIES}
    hits = {name: run.hit_ratio for name, run in runs.items()}
    assert hits["prefix"] > 1.05 * max(hits["least-loaded"], hits["round-robin"])
    assert hits["prefix"] <= hit_ceiling(trace, 16).found_ratio
    # In turn: no replica more than another.
    turns = np.bincount([served.replica for served in runs["round-robin"].served], minlength=4)
    assert turns.tolist() == [60] * 4
    # So little to do that what is known attracts; several all the same.
    assert len({served.replica for served in runs["prefix"].served}) >= 2
    for name, run in runs.items():
        again = serve(trace, 4, name)
        assert again.served == run.served, "one order of events"


def test_times_of_requests_that_do_not_meet():
    ids = np.arange(4)
    trace = [TracedRequest(at, 600, 5, ids[2 * n : 2 * n + 2]) for n, at in enumerate((0.0, 1.0))]
    first, second = serve(trace).served
    alone = serve(trace[:1]).served[0]
    assert (first.ttft, first.latency) == pytest.approx((alone.ttft, alone.latency))
    assert (second.ttft, second.latency) == pytest.approx((first.ttft, first.latency))
    # Two steps' prefill, and 4 decode steps of 326 us and what lies between two.
    assert 0.0015 < first.ttft < 0.01
    assert 4 * 326e-6 < first.latency - first.ttft < 4 * 426e-6
    assert 0 <= first.first_launched_s - first.arrival_s < 0.001
    run = serve([replace(trace[0], arrival_s=20.0)])
    assert run.served[0].ttft == pytest.approx(first.ttft), "after a long time without anything"
    assert run.duration_s == pytest.approx(20.0 + first.latency)


def test_what_does_not_fit_waits_in_the_coordinator():
    """Twice as many as slots are with a replica; all are served, in order."""
    ids = np.arange(2 * 40)
    trace = [TracedRequest(0.0, 600, 5, ids[2 * n : 2 * n + 2]) for n in range(40)]
    run = serve(trace, 2, max_requests=4)
    begun = [served.first_launched_s for served in run.served]
    assert begun == sorted(begun)
    assert min(served.ended_s for served in run.served) > 0
    assert run.counters["steps"] > 40
    figures = run.figures()
    assert figures["requests"] == 40
    assert figures["queue_ms"]["p99"] > 10 * figures["queue_ms"]["p50"] / 9
    assert 0 < figures["busy_share"] <= figures["busiest_share"] <= 1


def test_a_request_that_nobody_can_serve_is_told():
    with pytest.raises(RuntimeError, match=r"request 0 failed: .*max_sequence_length") as error:
        serve([TracedRequest(0.0, 5000, 5, np.arange(10))])
    assert isinstance(error.value.__cause__, RequestError)
