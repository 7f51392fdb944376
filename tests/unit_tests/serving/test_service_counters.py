"""Counters and histograms of a service."""

from __future__ import annotations

import pytest

from megatron_async.serving.service_counters import (
    HISTOGRAMS,
    Histogram,
    ServiceCounters,
    cumulative,
)


def test_bounds_rise_and_hold_what_is_on_them() -> None:
    for bounds in HISTOGRAMS.values():
        assert list(bounds) == sorted(set(bounds))
    assert HISTOGRAMS["e2e_seconds"][:4] == (0.001, 0.002, 0.005, 0.01)
    assert HISTOGRAMS["prompt_tokens"][-1] == 1e6
    histogram = Histogram((1.0, 2.0))
    for value in (-3.0, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == pytest.approx(13.5)


def test_times_of_a_request_are_the_services() -> None:
    counters = ServiceCounters()
    counters.ended(
        "length", prompt_tokens=7, cached_tokens=4, generated_tokens=11,
        wait_s=0.5, queue_s=0.25, ttft=1.0, latency=3.0,
    )  # fmt: skip
    sums = {name: histogram.total for name, histogram in counters.histograms.items()}
    assert sums == pytest.approx(
        {
            "queue_seconds": 0.75, "ttft_seconds": 1.5, "prefill_seconds": 0.75,
            "e2e_seconds": 3.5, "inference_seconds": 2.75, "decode_seconds": 2.0,
            "inter_token_seconds": 2.0, "prompt_tokens": 7, "generated_tokens": 11,
        }
    )  # fmt: skip
    assert sum(counters.histograms["inter_token_seconds"].counts) == 10
    assert (counters.prompt_tokens, counters.cached_tokens) == (7, 4)


def test_who_never_ran_says_nothing_of_times() -> None:
    counters = ServiceCounters()
    counters.ended("error", wait_s=3.0)
    counters.ended("aborted", wait_s=3.0)
    counters.ended("of another version", wait_s=3.0)
    counters.ended("termination_id", generated_tokens=1, ttft=0.1, latency=0.1)
    assert counters.reasons["error"] == 2
    assert sum(counters.histograms["inter_token_seconds"].counts) == 0
    assert sum(counters.histograms["ttft_seconds"].counts) == 1
    told = counters.as_dict()["histograms"]["ttft_seconds"]
    pairs = cumulative("ttft_seconds", told["counts"])
    assert pairs[-1] == ("+Inf", 1.0)
    assert dict(pairs)["0.05"] == 0
    assert dict(pairs)["0.1"] == 1
