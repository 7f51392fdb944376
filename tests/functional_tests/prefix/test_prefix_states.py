"""Hybrid models with prefix caching: requests begin from snapshots of recurrent states, and get the
tokens that they would get alone.

The models are those of the fuzzer, in float64, with states of nobody full of NaN. Snapshots stand
at multiples of 128 here.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_async import DynamicInferenceEngine
from megatron_async.devices import Chaos, CpuDevice
from tests.support.attention_model import VOCABULARY
from tests.support.caching_engine import answers_without_the_donor
from tests.support.capturing_cpu import CapturingCpu
from tests.support.harness import Job, alone_once, drain, fail_call, greedy, make_engine, run_at
from tests.support.hybrid_model import HYBRID_MODELS, HybridAttentionModel
from tests.support.late_device import LateDevice
from tests.support.poison import poison_states
from tests.support.tiny_launches import watch_state_plans

UNIT = 128
TURNS = 3
TEXT = [(7 * n * n + 3 * n // 5) % VOCABULARY for n in range(1500)]
OTHER = [(5 * n * n + 11) % VOCABULARY for n in range(1500)]
LIMITS: dict[str, Any] = {
    "max_tokens": 2048, "max_sequence_length": 1024, "num_kv_blocks": 600,
}  # fmt: skip


@pytest.fixture(scope="module", params=HYBRID_MODELS, ids=lambda kind: kind.pattern)
def model(request: pytest.FixtureRequest) -> HybridAttentionModel:
    made: HybridAttentionModel = request.param()
    return made


@pytest.fixture(scope="module")
def serial(model: HybridAttentionModel) -> Iterator[DynamicInferenceEngine]:
    """Plain decoding, with room for all, and nothing shared."""
    engine = make_engine(model, lookahead=0, max_requests=4, block_size_tokens=32, **LIMITS)
    yield engine
    engine.close()


def caching(model: HybridAttentionModel, **config: Any) -> DynamicInferenceEngine:
    settings = {**LIMITS, "block_size_tokens": 16, "max_requests": 8, **config}
    engine = make_engine(model, enable_prefix_caching=True, **settings)
    poison_states(engine)
    watch_state_plans(engine)
    return engine


def computed(engine: DynamicInferenceEngine, job: Job) -> tuple[list[int], int]:
    """A job's tokens, and how many tokens of its prompt were computed."""
    before = engine.stats()["prefill_tokens"]
    tokens = run_at(engine, {0: [job]})[0]
    return tokens, int(engine.stats()["prefill_tokens"] - before)


@pytest.mark.pairs
@pytest.mark.parametrize("block_size", [16, 96])
def test_warm_equals_cold(model, serial, lookahead, block_size: int):
    """Prompts that end around a border, and go on from what the ones before have left.

    Break one of these, and it fails:

    - `StateRows.plan`: read the request's own row
    - `keep_inputs` of the scan: keep the inputs one place off
    """
    unit = np.lcm(block_size, UNIT)
    lengths = [unit + n for n in range(-2, 4)] + [2 * unit + n for n in (0, 1, 2, 60)]
    jobs = [Job([*TEXT[:length], number], greedy(5)) for length in lengths for number in (1, 2)]
    engine = caching(model, lookahead=lookahead, block_size_tokens=int(block_size))
    found = [computed(engine, job) for job in jobs]
    assert [tokens for tokens, _ in found] == alone_once(serial, jobs)
    for job, (_, count) in list(zip(jobs, found))[1::2]:
        prompt = len(job.prompt)
        # The one before has left its state behind its last whole block, and one token is computed.
        assert count == prompt - (prompt - 1) // unit * unit, prompt


def test_bit_for_bit(model: HybridAttentionModel) -> None:
    """Beginning from a snapshot is what a chunk that begins there is."""

    def log_probs(engine: DynamicInferenceEngine, number: int) -> list[float]:
        prompt = [*TEXT[: UNIT + 30], number]
        params = greedy(8, return_log_probs=True, skip_prompt_log_probs=True)
        future = engine.add_request(number, prompt, params)
        drain(engine)
        found = future.result().generated_log_probs
        assert found is not None
        return list(found)

    cold = caching(model, max_tokens=UNIT, num_kv_blocks=64)
    expected = log_probs(cold, 2)
    warm = caching(model, max_tokens=UNIT, num_kv_blocks=64)
    log_probs(warm, 1)
    assert log_probs(warm, 2) == expected
    assert (cold.stats()["prefix_cache_snapshot_hits"], cold.stats()["prefix_cache_hits"]) == (0, 0)
    assert warm.stats()["prefix_cache_hits"] == UNIT
    cold.close()


@pytest.mark.pairs
@pytest.mark.parametrize("budget", [2048, 200, 150])
def test_equal_prompts_cost_one_prefill(model, serial, lookahead, budget: int):
    """Equal prompts arrive together; a prompt takes one step, or several."""
    jobs = [Job(TEXT[:400], greedy(4)) for _ in range(8)]
    expected = alone_once(serial, jobs)
    engine = caching(model, lookahead=lookahead, max_tokens=budget, max_requests=16)
    assert run_at(engine, {0: jobs}) == expected
    assert engine.stats()["prefill_tokens"] == 400 + 7 * (400 - 384)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_where_prompts_part(model: HybridAttentionModel, serial: DynamicInferenceEngine, lookahead):
    """The second that begins alike leaves its state where they part; the third one begins there.
    Break it, and it fails: `StateRows.begin` marks no junction."""
    jobs = [Job([*TEXT[:300], *OTHER[n : n + 200]], greedy(6)) for n in range(5)]
    engine = caching(model, lookahead=lookahead, prefix_caching_mamba_interval=0)
    found = [computed(engine, job) for job in jobs]
    assert [tokens for tokens, _ in found] == alone_once(serial, jobs)
    assert [count for _, count in found] == [500, 500, 244, 244, 244]
    stats = engine.stats()
    assert stats["prefix_cache_lost_no_state"] == 288 + 3 * 32
    assert stats["prefix_cache_snapshot_hits"] == 3
    # Snapshots of the ends, and the one where they part.
    assert stats["prefix_cache_snapshots"] == 5 + 1


def test_every_so_often(model: HybridAttentionModel, serial: DynamicInferenceEngine) -> None:
    """Snapshots inside a prompt: a shorter one begins behind the last of them that it reaches."""
    engine = caching(model, prefix_caching_mamba_interval=200, num_state_snapshots=20)
    first = Job(TEXT[:900], greedy(2))
    assert computed(engine, first)[1] == 900
    assert engine.stats()["prefix_cache_snapshots"] == 4  # 256, 512, 768, and 896 at the end
    job = Job([*TEXT[:700], 1], greedy(4))
    tokens, count = computed(engine, job)
    assert tokens == alone_once(serial, [job])[0]
    assert count == 701 - 512


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_conversation_computes_what_is_new(model, serial, lookahead):
    """Turn after turn, answers included: decoding leaves states too, of which one is kept.

    Break one of these, and it fails:

    - `flush_kernels.flush`: keep no inputs of the convolution
    - `PrefixCache.plan_states`: keep the states of two steps later
    """
    engine, prompt = caching(model, lookahead=lookahead), TEXT[:90]
    known = 0
    for turn in range(TURNS):
        job = Job(prompt, greedy(160))
        tokens, count = computed(engine, job)
        assert tokens == alone_once(serial, [job])[0]
        assert count <= len(prompt) - known + 2 * UNIT
        assert turn == 0 or count < len(prompt) - 60
        known = len(prompt) + len(tokens)
        prompt = [*prompt, *tokens, *OTHER[turn : turn + 10]]
    assert engine.stats()["prefix_cache_snapshots"] <= 2 * TURNS


def test_one_state_of_decoding_is_kept(model: HybridAttentionModel) -> None:
    """The last of a long answer; others that were found meanwhile stay."""
    engine = caching(model, num_state_snapshots=20, prefix_caching_mamba_interval=0)
    answer = run_at(engine, {0: [Job(TEXT[:20], greedy(380))]})[0]
    assert engine.stats()["prefix_cache_snapshots"] == 1
    turn = Job([*TEXT[:20], *answer, 1], greedy(1))
    assert computed(engine, turn)[1] == 401 - 384


@pytest.mark.parametrize("lookahead", [0, 1])
def test_live_requests_take_the_rows_of_snapshots(model, serial, lookahead):
    """Rows for few requests: one may have to go on in the very row that it begins from. Break it,
    and it fails: `StateRows._is_in_use` says no."""
    jobs = [
        Job([*(TEXT, OTHER)[n // 3 % 2][: 150 + 7 * n], n % VOCABULARY], greedy(3 + n % 5))
        for n in range(12)
    ]
    expected = alone_once(serial, jobs)
    for rows in (2, 3):
        engine = caching(model, lookahead=lookahead, max_requests=rows)
        arrivals = {4 * n: [job] for n, job in enumerate(jobs)}
        assert run_at(engine, arrivals) == expected
        assert run_at(engine, {0: jobs}) == expected
        stats = engine.stats()
        assert stats["prefix_cache_snapshot_hits"] > 0
        assert stats["prefix_cache_snapshot_evictions"] > 0


@pytest.mark.parametrize("snapshots", [0, 1, 50, -1])
def test_a_budget_of_their_own(model, serial, snapshots: int):
    # With one of them, answers leave states as well: they pass 384.
    tokens = 92 if snapshots == 1 else 12
    jobs = [Job([*TEXT[:300], n], greedy(tokens)) for n in range(6)]
    field = "num_state_snapshots" if snapshots >= 0 else "prefix_caching_mamba_gb"
    engine = caching(model, max_requests=4, **{field: snapshots})
    assert run_at(engine, {n: [job] for n, job in enumerate(jobs)}) == alone_once(serial, jobs)
    stats = engine.stats()
    assert stats["prefix_cache_snapshots"] <= max(snapshots, 0)
    assert (stats["prefix_cache_snapshot_hits"] > 0) == (snapshots > 0)


def test_an_evicted_request_finds_its_own_state(model, serial):
    jobs = [Job([n, *TEXT[: 180 + n]], greedy(120)) for n in range(3)]
    engine = caching(model, max_requests=6, num_kv_blocks=46, paused_buffer_size_gb=1e-9)
    assert run_at(engine, {0: jobs}) == alone_once(serial, jobs)
    stats = engine.stats()
    assert stats["evictions"] > 0
    assert stats["prefix_cache_hits"] > 0
    assert stats["recomputed_tokens"] < stats["evictions"] * 180


@pytest.mark.pairs
@pytest.mark.parametrize("steps", range(1, 6))
def test_the_donor_goes(model, serial, lookahead, steps: int):
    """A request is aborted while steps of it are in flight and others begin from its state."""
    jobs = [Job([*TEXT[:270], number], greedy(9)) for number in range(4)]
    engine = caching(model, device=LateDevice(), lookahead=lookahead, max_requests=4,
                     num_kv_blocks=80, max_tokens=140)  # fmt: skip
    assert answers_without_the_donor(engine, jobs, steps) == alone_once(serial, jobs)[1:]
    assert engine.stats()["prefix_cache_snapshot_hits"] > 0


@pytest.mark.pairs
@pytest.mark.parametrize("failing", range(8))
def test_a_failed_steps_states_are_not_found(model, serial, lookahead, failing: int):
    """Break `StateRows.failed` so that it forgets nothing, and it fails: the keys and values where
    prompts part are older than the state there."""
    jobs = [Job([*TEXT[:300], *OTHER[n : n + 90]], greedy(3)) for n in range(5)]
    expected = alone_once(serial, jobs)
    engine = caching(model, lookahead=lookahead, prefix_caching_mamba_interval=0)
    fail_call(engine.controller, "enqueue_step", failing + 1, RuntimeError("planted"))
    for first_id in (0, 10):
        futures = []
        for number, job in enumerate(jobs, first_id):
            futures.append(engine.add_request(number, job.prompt, job.params))
            for _ in range(4):
                engine.step_modern()
        drain(engine)
        for request, tokens in zip([future.result() for future in futures], expected):
            assert (request.error is not None and first_id == 0) or (
                request.generated_tokens == tokens
            )
    assert engine.stats()["failed_requests"] > 0


def test_what_is_forgotten(model: HybridAttentionModel) -> None:
    """Salts keep tenants apart; a reset, and a suspend that gives memory back, forget all."""
    engine = caching(model)
    for salt, count in (("a", 301), ("b", 301), ("a", 45), (None, 301), (None, 45)):
        assert computed(engine, Job([*TEXT[:300], 1], greedy(2, cache_salt=salt)))[1] == count
    engine.reset_prefix_cache()
    assert engine.stats()["prefix_cache_snapshots"] == 0
    assert computed(engine, Job([*TEXT[:300], 1], greedy(2)))[1] == 301
    engine.suspend(free_kv_cache=True)
    engine.resume()
    assert computed(engine, Job([*TEXT[:300], 1], greedy(2)))[1] == 301
    assert computed(engine, Job([*TEXT[:300], 1], greedy(2)))[1] == 45


@pytest.mark.parametrize("lookahead", [0, 2])
def test_captured_steps(model: HybridAttentionModel, serial: DynamicInferenceEngine, lookahead):
    """Padded steps whose shapes alone are known when they are captured."""
    jobs = [Job([*TEXT[: 120 + 13 * n], n], greedy(30 + n)) for n in range(9)]
    engine = caching(model, device=CapturingCpu(), lookahead=lookahead, max_tokens=160,
                     max_requests=5, num_cuda_graphs=3)  # fmt: skip
    assert run_at(engine, {3 * n: [job] for n, job in enumerate(jobs)}) == alone_once(serial, jobs)
    stats = engine.stats()
    assert stats["captured_steps"] > stats["steps"] / 2
    assert stats["prefix_cache_snapshot_hits"] > 2


def test_late_copies(model: HybridAttentionModel, serial: DynamicInferenceEngine) -> None:
    """On a device that delays its streams at random."""
    prompts = [[*TEXT[:cut], n] for n, cut in enumerate((300, 140, 500, 300, 257, 129, 384, 260))]
    jobs = [Job(prompt, greedy(20 + n)) for n, prompt in enumerate(prompts)]
    expected = alone_once(serial, jobs)
    for seed, lookahead in itertools.product(range(2), (1, 2)):
        engine = caching(model, device=CpuDevice(Chaos(seed, 0.2, 0.001)), lookahead=lookahead,
                         max_requests=3, max_tokens=170)  # fmt: skip
        assert run_at(engine, {2 * n: [job] for n, job in enumerate(jobs)}) == expected
