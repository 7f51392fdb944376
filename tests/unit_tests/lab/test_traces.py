"""Arrival traces, and how they are served."""

import math
import time

import numpy as np
import pytest

from megatron_async import LLM
from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import (
    LengthDistribution,
    TraceRequest,
    poisson_trace,
)
from megatron_async.lab.trace_server import serve_trace
from megatron_async.lab.workloads import greedy


def tiny(lookahead=1, max_requests=8):
    return LLM(
        "dummy:tiny",
        device="cpu",
        lookahead=lookahead,
        block_size_tokens=16,
        num_kv_blocks=200,
        check_integrity=True,
        max_requests=max_requests,
        max_tokens=256,
        max_sequence_length=256,
    )


def test_traces_are_deterministic_by_seed_and_scaled_by_rate():
    prompts, outputs = LengthDistribution(64, 256), LengthDistribution(32, 128)

    def trace(rate=10.0, seed=0, count=2000):
        return poisson_trace(rate, count, prompts, outputs, 1000, seed)

    first, again, faster, other = trace(), trace(), trace(rate=40.0), trace(seed=1)
    for a, b, c in zip(first, again, faster, strict=True):
        assert a.arrival_s == b.arrival_s == pytest.approx(4 * c.arrival_s)
        assert a.output_tokens == b.output_tokens == c.output_tokens
        assert np.array_equal(a.prompt, b.prompt)
        assert np.array_equal(a.prompt, c.prompt)
    assert [r.output_tokens for r in first] != [r.output_tokens for r in other]
    assert first[5].arrival_s == trace(count=6)[5].arrival_s
    # Poisson: gaps of mean and standard deviation 1 / rate. Four standard errors.
    gaps = np.diff([0.0, *(r.arrival_s for r in first)])
    assert gaps.mean() == pytest.approx(0.1, rel=4 / math.sqrt(2000))
    assert gaps.std() == pytest.approx(0.1, rel=0.15)
    lengths = np.array([len(r.prompt) for r in first])
    assert lengths.mean() == pytest.approx(64, rel=0.1)
    assert 1 <= lengths.min() < lengths.max() <= 256
    assert all(r.arrival_s == 0 for r in trace(rate=math.inf, count=3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: LengthDistribution(300, 256), "mean length of 300 tokens .* longest, 256"),
        (lambda d: LengthDistribution(3, 5, sigma=-1), "sigma=-1"),
        (lambda d: poisson_trace(0.0, 4, d, d, 10, 0), "rate=0.0"),
        (lambda d: poisson_trace(1.0, 0, d, d, 10, 0), "num_requests=0"),
    ],
)
def test_bad_traces(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make(LengthDistribution(8, 8))


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_trace_is_served_by_the_wall_clock(lookahead):
    """Two bursts with an idle second half: nobody is served before arriving, lengths are kept, and
    the burst that is too large for the slots queues."""
    trace = poisson_trace(math.inf, 6, LengthDistribution(8, 16), LengthDistribution(6, 12), 500, 3)
    moved = [
        type(r)(arrival_s=0.25 * (i // 3), prompt=r.prompt, output_tokens=r.output_tokens)
        for i, r in enumerate(trace)
    ]
    finishes = []
    with tiny(lookahead, max_requests=2) as llm:
        served = serve_trace(llm.engine, moved, lambda n, tokens: finishes.append((n, tokens)))
    assert served.duration_s > 0.25
    assert [len(r.tokens) for r in served.requests] == [r.output_tokens for r in moved]
    assert [r.prompt_tokens for r in served.requests] == [len(r.prompt) for r in moved]
    for request in served.requests:
        assert 0 <= request.queue_s < request.ttft_s <= request.latency_s
        assert request.latency_s < served.duration_s
        assert (request.tpot_s is None) == (len(request.tokens) == 1)
    assert served.most_waiting >= 1
    assert max(r.queue_s for r in served.requests) > min(r.queue_s for r in served.requests)
    assert sum(n for n, _ in finishes) == 6
    assert finishes[-1][1] == sum(r.output_tokens for r in moved)
    # The engine went idle between the bursts: those steps had none before them.
    assert served.overlap_ratio == (1 if lookahead else 0)


def test_times_count_from_the_arrival_by_the_trace():
    """A consumer that blocks the loop for half a second delays the request that arrives meanwhile,
    and the delay is that request's."""
    tokens = np.arange(4, dtype=np.int32)
    trace = [TraceRequest(arrival_s, tokens, output_tokens=1) for arrival_s in (0.0, 0.2)]
    sleeps = iter([0.5, 0.0])
    with tiny() as llm:
        llm.generate([[1, 2, 3, 4]], greedy(2))  # warm
        served = serve_trace(llm.engine, trace, lambda *_: time.sleep(next(sleeps)))
    late = served.requests[1]
    assert served.late_s > 0.25
    assert served.late_s <= late.queue_s <= late.ttft_s <= late.latency_s
    assert served.requests[0].latency_s <= served.duration_s - 0.5
