"""Traces with ids of shared pieces: files, tokens, made-up sessions, and the ceiling of hits."""

import itertools
import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError, RequestError
from megatron_async.lab.arrival_trace import LengthDistribution
from megatron_async.lab.device_times import MACHINES
from megatron_async.lab.fleets.fleet import simulate_fleet
from megatron_async.lab.fleets.session_traces import KINDS, SessionKind, SessionTrace
from megatron_async.lab.fleets.trace_files import TraceError, TraceFile, write_trace
from megatron_async.lab.fleets.traced_requests import TracedRequest, hit_ceiling, tokens_of
from megatron_async.lab.model_shape import ModelShape
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.serving.routing import POLICIES

VOCABULARY = 1000
SMALL = SessionKind(
    shared_tokens=512,
    num_shared=2,
    turns=LengthDistribution(4, 9),
    first_tokens=LengthDistribution(40, 200),
    new_tokens=LengthDistribution(90, 400),
    output_tokens=LengthDistribution(50, 300),
    think_s=1.0,
    longest=2500,
)
TOOLAGENT = """\
{"timestamp": 0, "input_length": 2290, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]}
{"timestamp": 0, "input_length": 3121, "output_length": 20, \
"hash_ids": [74, 75, 76, 77, 78, 79, 80]}
{"timestamp": 0, "input_length": 3137, "output_length": 19, \
"hash_ids": [74, 75, 76, 77, 78, 126, 127]}
"""
"""Lines of Mooncake's FAST25-release/traces/toolagent_trace.jsonl."""


def request(inputs, outputs, *ids, at=0.0):
    return TracedRequest(at, inputs, outputs, np.array(ids, dtype=np.int64))


def sequence(one):
    """All tokens of a request, its answer's too."""
    return request(one.input_tokens + one.output_tokens, 0, *one.ids).prompt(VOCABULARY).tolist()


def test_tokens_follow_from_ids():
    a, b = request(1300, 9, 5, 6, 7), request(1024, 9, 5, 8)
    first, second = a.prompt(VOCABULARY), b.prompt(VOCABULARY)
    assert (first.dtype, len(first), len(second)) == (np.int32, 1300, 1024)
    assert first.min() >= 0
    assert first.max() < VOCABULARY
    assert (first[:512] == second[:512]).all()
    for begin in range(512, 1024, 16):
        assert (first[begin : begin + 16] != second[begin : begin + 16]).any()
    assert (request(700, 9, 5, 6).prompt(VOCABULARY) == first[:700]).all(), "a shorter last piece"
    # They are to be the same tomorrow, or figures of one trace could not be compared.
    ids, places = np.array([0, 0, 7, -(2**30)]), np.array([0, 1, 0, 511])
    assert tokens_of(ids, places, 128_256).tolist() == [117532, 45302, 15514, 1754]


def test_public_traces_are_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(TOOLAGENT)
    first, second, third = TraceFile(path)
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 2290, 316)
    assert first.ids.tolist()[:5] == [0, 42, 43, 44, 45]
    assert len(first.ids) == 6, "the answer reaches into one more piece"
    assert min(first.ids[5], 0) < 0
    assert (second.prompt(VOCABULARY)[:2560] == third.prompt(VOCABULARY)[:2560]).all()
    ceiling = hit_ceiling(TraceFile(path), 64)
    assert (ceiling.requests, ceiling.shared_tokens, ceiling.found_tokens) == (3, 2560, 2560)


def test_a_trace_comes_back_from_its_file(tmp_path):
    path, trace = tmp_path / "trace.jsonl", SessionTrace(SMALL, 5.0, 60, seed=3)
    assert write_trace(path, trace) == 60
    for made, read in zip(trace, TraceFile(path), strict=True):
        assert read.arrival_s == pytest.approx(made.arrival_s, abs=1e-6)
        assert sequence(read) == sequence(made)
    assert hit_ceiling(TraceFile(path), 16) == hit_ceiling(trace, 16)
    # Without our field, answers are nobody's, and all else stays.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("output_hash_ids", None)
    path.write_text("\n".join(map(json.dumps, lines)))
    answers = set()
    for made, read in zip(trace, TraceFile(path), strict=True):
        assert read.prompt(VOCABULARY).tolist() == made.prompt(VOCABULARY).tolist()
        assert answers.isdisjoint(read.ids[read.prompt_pieces :].tolist())
        answers |= set(read.ids[read.prompt_pieces :].tolist())


GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON object"),
        ("[1]", "line 2 is no JSON object"),
        (b"\xff", "line 2 is no JSON object"),
        ({**GOOD, "timestamp": 4}, "line 2: timestamp is 4 ms and 5 ms in the line before"),
        ({**GOOD, "timestamp": "1"}, "line 2: timestamp is '1' and must be a number"),
        ({**GOOD, "timestamp": -1}, "line 2: timestamp is '-1'"),
        ({**GOOD, "input_length": 0}, "line 2: input_length is '0'"),
        ({**GOOD, "input_length": 2**40}, "line 2: input_length is '1099511627776'"),
        ({**GOOD, "output_length": 1.5}, "line 2: output_length is '1.5'"),
        ({**GOOD, "output_length": True}, "line 2: output_length is 'True'"),
        ({**GOOD, "hash_ids": [1]}, "line 2: hash_ids has 1 ids, and 600 tokens of input_length"),
        ({**GOOD, "hash_ids": [1, -2]}, "line 2: hash_ids is '-2'"),
        ({**GOOD, "hash_ids": [1, 2**60]}, "line 2: hash_ids is '1152921504606846976'"),
        ({**GOOD, "hash_ids": 7}, "line 2: hash_ids is '7' and must be a list"),
        ({**GOOD, "output_hash_ids": [4]}, "line 2: output_hash_ids has 1 ids, and 3 tokens of"),
        ({"timestamp": 9}, "line 2: input_length is missing; there is timestamp"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, line, message):
    path = tmp_path / "wrong.jsonl"
    text = (
        line
        if isinstance(line, bytes)
        else (line if isinstance(line, str) else json.dumps(line)).encode()
    )
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + text + b"\n")
    found = iter(TraceFile(path))
    assert next(found).input_tokens == 600, "what stands before an error is read"
    with pytest.raises(TraceError) as error:
        next(found)
    assert str(error.value).startswith(f"{path}, {message}")


def test_a_file_is_never_all_in_memory(tmp_path):
    path = tmp_path / "long.jsonl"
    line = json.dumps({**GOOD, "input_length": 51_200, "hash_ids": list(range(100))})
    path.write_text(f"{line}\n" * 20_000)
    tracemalloc.start()
    assert sum(one.input_tokens for one in TraceFile(path)) == 51_200 * 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6 < path.stat().st_size / 4


def test_turns_repeat_what_was_said():
    trace = list(SessionTrace(SMALL, 5.0, 200, seed=1))
    arrivals = [one.arrival_s for one in trace]
    assert arrivals == sorted(arrivals)
    said, repeats = [], 0
    for one in trace:
        tokens = sequence(one)
        before = next((old for old in said if tokens[: len(old)] == old), None)
        if before is None:
            assert len(one.prompt(VOCABULARY)) <= 512 + 200
        else:
            repeats += 1
            assert len(before) < one.input_tokens <= len(before) + 400
            said.remove(before)
        said.append(tokens)
        assert len(tokens) <= SMALL.longest
    assert repeats > 120
    assert len({tuple(one[:512]) for one in said}) == 2, "shared prompts"


def test_a_seed_says_it_all():
    def read(rate, seed):
        return [
            (one.arrival_s, one.input_tokens, one.output_tokens, tuple(one.ids.tolist()))
            for one in SessionTrace(SMALL, rate, 50, seed)
        ]

    assert read(5.0, 1) == read(5.0, 1) != read(5.0, 2)
    first = [next(iter(SessionTrace(SMALL, rate, 1, 4))).input_tokens for rate in (0.1, 100.0)]
    assert first[0] == first[1]


def test_kinds_are_as_they_are_described():
    for name, ratio in (("chats", (5, 15)), ("agents", (110, 160))):
        trace = list(SessionTrace(KINDS[name], 10.0, 3000))
        outputs = sum(one.output_tokens for one in trace)
        assert ratio[0] < sum(one.input_tokens for one in trace) / outputs < ratio[1]
        rate = 1000 / (trace[-1].arrival_s - trace[-1001].arrival_s)
        assert rate == pytest.approx(10.0, rel=0.35), "what was asked for, once it has risen"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_tokens": 100}, "shared_tokens=100 must be a multiple of 512"),
        ({"num_shared": 0}, "num_shared=0"),
        ({"think_s": -1.0}, "think_s=-1.0"),
        ({"longest": 600}, "longest=600 must be at least 1012"),
    ],
)
def test_sessions_that_cannot_be(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        SessionKind(**{**vars(SMALL), **changes})
    for rate, count in ((0.0, 1), (float("inf"), 1), (1.0, 0)):
        with pytest.raises(ConfigurationError, match="must both be above 0"):
            SessionTrace(SMALL, rate, count)


@pytest.mark.parametrize("size", [1, 16, 48, 512])
def test_the_ceiling_is_what_a_search_of_all_tokens_finds(size):
    computed, shared, found = [], 0, 0
    trace = list(SessionTrace(SMALL, 5.0, 60, seed=7))
    # Prompts again, as when an answer is asked for twice, and one of a block's size.
    trace += [trace[3], trace[30], request(512, 1, *trace[0].ids[:2])]
    for one in trace:
        prompt = one.prompt(VOCABULARY)
        longest = 0
        for old in computed:
            length = min(len(old), len(prompt))
            differs = np.flatnonzero(old[:length] != prompt[:length])
            longest = max(longest, int(differs[0]) if len(differs) else length)
        shared += longest
        found += min(longest // size * size, len(prompt) - 1)
        computed.append(np.array(sequence(one)[:-1]))
    ceiling = hit_ceiling(trace, size)
    assert (ceiling.shared_tokens, ceiling.found_tokens) == (shared, found)
    assert ceiling.prompt_tokens == sum(one.input_tokens for one in trace)
    assert ceiling.longest == max(one.input_tokens + one.output_tokens for one in trace)
    assert 0 < ceiling.found_ratio <= ceiling.shared_ratio < 1


def test_an_empty_trace_has_a_ceiling():
    assert hit_ceiling([], 16).found_ratio == 0
    assert list(itertools.islice(SessionTrace(SMALL, 1.0, 3), 9))[3:] == []


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
