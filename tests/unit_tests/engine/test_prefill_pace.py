"""With a target for the time between tokens, prompts get what fits, and all ranks plan alike."""

from pathlib import Path

import numpy as np
import pytest

from megatron_async.config import InferenceConfig
from megatron_async.engine.prefill_limit import FIRST_TOKENS
from megatron_async.engine.step_costs import KEPT, StepCosts, StepWork
from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import LengthDistribution, poisson_trace
from megatron_async.lab.device_times import CpuTimes, DeviceTimes, Machine
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.recorder import Recorder
from megatron_async.lab.recording import PrefillLimit, load_recording
from megatron_async.lab.replay import Replay
from megatron_async.lab.simulator import Simulated, simulate
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.planning.graph_shapes import LEAST_PREFILL_TOKENS
from tests.support.harness import drain, greedy, make_engine, make_model, random_prompts
from tests.support.memory_channel import FollowingEngine

SHAPE = ModelShape.of_architecture(DUMMY_SHAPES["llama-3.1-8b"], "bfloat16")
CPU = CpuTimes(
    prepare_us=50, launch_us=50, resolve_us=50, eager_launch_us=500, add_us=0, turnaround_us=5
)
# Weights are read in the time of 256 tokens, so a line does not fit everywhere.
DEVICE = DeviceTimes(tokens_us=((256, 4000), (2048, 40_000)), decode_us=10, kv_us=0.02)
MODEL = make_model()


def serve(rate: float = 30, count: int = 150, **config: object) -> Simulated:
    prompts, outputs = LengthDistribution(400, 2000, 0.6), LengthDistribution(100, 300, 0.6)
    trace = poisson_trace(rate, count, prompts, outputs, SHAPE.vocab_size, 0)
    settings = {"num_kv_blocks": 4000, "max_sequence_length": 2300, "max_requests": 64}
    made = InferenceConfig(**{**settings, "lookahead": 1, **config})  # type: ignore[arg-type]
    return simulate(trace, SHAPE, made, Machine(DEVICE, CPU, "made up"))


def test_running_requests_keep_their_pace(lookahead: int) -> None:
    free, held = serve(lookahead=lookahead), serve(lookahead=lookahead, target_tpot_ms=9)
    assert free.gap_p99_ms > 14
    assert held.gap_p99_ms < 9.3
    # Prompts wait for that, but no longer than the smaller steps take.
    assert held.figures()["ttft_ms"]["p50"] < 2 * free.figures()["ttft_ms"]["p50"]
    assert held.figures()["tokens_out_per_second"] > 0.97 * free.figures()["tokens_out_per_second"]


def test_a_target_that_cannot_be_met_lets_prompts_go_on() -> None:
    """All requests come to their ends; a step has the least there is."""
    held = serve(rate=5, count=40, target_tpot_ms=1)
    assert held.gap_p99_ms < 6


def test_no_limit_without_running_requests() -> None:
    """A prompt alone is prefilled as fast as ever."""
    free, held = serve(0.5, 20), serve(0.5, 20, target_tpot_ms=5)
    assert held.figures()["ttft_ms"]["p50"] == free.figures()["ttft_ms"]["p50"]


def test_costs_are_learned_and_outliers_forgotten() -> None:
    rng, costs = np.random.default_rng(0), StepCosts()
    for step in range(4 * KEPT):
        prompt = int(rng.integers(64, 400)) * (step % 3 > 0)
        work = StepWork(1, prompt, 16, int(rng.integers(1000, 9000)), prompt * 500)
        time_us = 3000 + 10 * prompt + 5 * 16 + 0.1 * work.kv_tokens + 0.004 * work.pairs
        costs.add(work, time_us if step % 20 else 50_000.0)
    room = costs.prefill_tokens_in(6000, StepWork(1, 0, 16, 5000, 0), 500)
    assert room == pytest.approx((6000 - 3580) / 12, rel=0.03)
    assert costs.most_seen < 400


def test_nothing_is_known_at_first() -> None:
    costs = StepCosts()
    assert costs.prefill_tokens_in(6000, StepWork(1, 0, 16, 5000, 0), 0) is None
    assert costs.most_seen == 0


@pytest.mark.parametrize("target", [0, -3.0, float("nan"), float("inf"), "8", True])
def test_a_bad_target_is_refused(target: object) -> None:
    with pytest.raises(ConfigurationError, match=r"target_tpot_ms=.* milliseconds above 0"):
        InferenceConfig(target_tpot_ms=target)  # type: ignore[arg-type]


def test_whole_prompts_have_no_target() -> None:
    with pytest.raises(ConfigurationError, match="enable_chunked_prefill=True"):
        InferenceConfig(target_tpot_ms=5, enable_chunked_prefill=False)


def long_prompts() -> list[list[int]]:
    return random_prompts(9, (3, 90, 200, 330, 70, 280, 310, 370, 350))


SETTINGS = {
    "max_sequence_length": 420, "max_tokens": 400, "max_requests": 4, "num_kv_blocks": 128,
    "block_size_tokens": 16, "target_tpot_ms": 0.001,
}  # fmt: skip
"""A target that no step meets: the limit falls."""


def test_tokens_are_the_same(lookahead: int) -> None:
    answers = []
    for target in (None, 0.001):
        engine = make_engine(
            MODEL, **{**SETTINGS, "target_tpot_ms": target, "lookahead": lookahead}
        )
        ended = engine.generate(long_prompts(), [greedy(40)] * 9)
        answers.append([request.generated_tokens for request in ended])
        limit, late = (engine.stats()[name] for name in ("prefill_limit", "late_steps"))
        assert (limit < FIRST_TOKENS, late > 0) == (target is not None, target is not None)
        assert limit >= LEAST_PREFILL_TOKENS
        engine.close()
    assert answers[0] == answers[1]


def test_followers_plan_by_their_leaders_clock() -> None:
    leader = make_engine(MODEL, **SETTINGS, check_ranks_agree=True)
    following = FollowingEngine(leader, make_engine(MODEL, **SETTINGS, check_ranks_agree=True))
    follower = following.engine
    follower.loop._prefill_limit._now_us = lambda: 0.0  # type: ignore[union-attr]  # never late
    leader.generate(long_prompts(), [greedy(40)] * 9)
    drain(leader)
    leader.close()
    following.join()
    limits = leader.context.scheduler.prefill_limit, follower.context.scheduler.prefill_limit
    steps = leader.stats()["steps"], follower.stats()["steps"]
    follower.close()
    assert following.error is None, following.error
    assert limits[0] == limits[1] < FIRST_TOKENS
    assert steps[0] == steps[1]


def test_a_recording_replays_what_the_clock_said(tmp_path: Path) -> None:
    engine = make_engine(MODEL, **SETTINGS)
    recorder = Recorder(engine, tmp_path / "run.rec")
    engine.generate(long_prompts(), [greedy(40)] * 9)
    drain(engine)
    recorder.close()
    steps = engine.statistics.steps
    engine.close()
    recording = load_recording(tmp_path / "run.rec")
    limits = [event.tokens for event in recording.events if isinstance(event, PrefillLimit)]
    assert limits[0] == FIRST_TOKENS
    assert LEAST_PREFILL_TOKENS <= limits[-1] < FIRST_TOKENS
    assert Replay(recording).run() == steps
    # Without them the plans are others.
    recording.events = [e for e in recording.events if not isinstance(e, PrefillLimit)]
    with pytest.raises(ValueError, match="differs from the recording"):
        Replay(recording).run()
