"""Beside running requests prompts get a measured number of tokens, or half of what waits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_async.config import InferenceConfig
from megatron_async.engine.listener import EngineListener
from megatron_async.engine.prefill_limit import SHARE, PromptShare
from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import LengthDistribution, poisson_trace
from megatron_async.lab.device_times import MACHINES
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.recorder import Recorder
from megatron_async.lab.recording import PrefillLimit, load_recording
from megatron_async.lab.replay import Replay
from megatron_async.lab.simulator import Simulated, simulate
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.planning.graph_shapes import (
    LEAST_PREFILL_TOKENS,
    MOST_TIMED,
    STRETCH,
    GraphShapes,
)
from megatron_async.planning.request_slots import SlotState
from megatron_async.planning.step_plan import StepPlan
from tests.support.harness import drain, greedy, make_engine, make_model, random_prompts
from tests.support.memory_channel import FollowingEngine

SHAPE = ModelShape.of_architecture(DUMMY_SHAPES["llama-3.1-8b"], "bfloat16")
MODEL = make_model()


def serve(rate: float, count: int = 250, **config: Any) -> Simulated:
    prompts, outputs = LengthDistribution(256, 1024, 0.6), LengthDistribution(128, 512, 0.6)
    trace = poisson_trace(rate, count, prompts, outputs, SHAPE.vocab_size, 0)
    made = InferenceConfig(
        num_kv_blocks=8000, block_size_tokens=64, max_sequence_length=1536, **config
    )
    return simulate(trace, SHAPE, made, MACHINES["h200:llama-3.1-8b"])


def test_running_requests_wait_less_and_first_tokens_little_longer() -> None:
    whole, share = serve(48, mixed_step_tokens=2048).figures(), serve(48).figures()
    assert share["gap_p99_ms"] < 0.6 * whole["gap_p99_ms"]
    assert share["tpot_ms"]["p50"] < 0.97 * whole["tpot_ms"]["p50"]
    assert share["ttft_ms"]["p50"] < 1.25 * whole["ttft_ms"]["p50"]
    assert share["latency_ms"]["p50"] < whole["latency_ms"]["p50"]


def test_what_waits_is_served_as_fast_as_ever() -> None:
    whole, share = serve(1e6, 400, mixed_step_tokens=2048), serve(1e6, 400)
    rates = [served.figures()["tokens_out_per_second"] for served in (whole, share)]
    assert rates[1] > 0.985 * rates[0]


def test_short_steps_end_where_time_grows() -> None:
    sizes = {size: (0, 64) for size in (32, 64, 128, 256, 512, MOST_TIMED, 2 * MOST_TIMED)}
    shapes = GraphShapes((64,), sizes, is_packed=True)
    timed = [dims.tokens for dims in shapes.timed_shapes()]
    assert timed == [32, 64, 128, 256, 512, MOST_TIMED]
    shapes.limit_mixed_steps([4.0, 4.0, 4.0, STRETCH * 4.0, STRETCH * 4.1, 20.0])
    assert shapes.mixed_step_tokens == 256


def test_of_short_steps_the_one_with_the_cheapest_tokens_counts() -> None:
    """An H200's times of the 8B shape, where 288 tokens take a millisecond more than 256."""
    shapes = GraphShapes((64,), {size: (0,) for size in (64, 128, 256, 288, 384)}, is_packed=True)
    shapes.limit_mixed_steps([4.23, 4.84, 6.35, 7.49, 8.73])
    assert shapes.mixed_step_tokens == 256


def test_no_limit_is_told_where_all_steps_are_short() -> None:
    shapes = GraphShapes((64,), {32: (0,), 64: (0,)}, is_packed=True)
    shapes.limit_mixed_steps([4.0, 5.0])
    assert shapes.mixed_step_tokens is None
    shapes.mixed_sizes = {}
    shapes.limit_mixed_steps([])
    assert shapes.mixed_step_tokens is None


class Books:
    """The parts of a context that a limit looks at."""

    def __init__(self, measured: int | None, waits: int, rows: int, **config: Any) -> None:
        state = np.full(64, SlotState.FREE)
        state[:rows] = SlotState.DECODING
        state[rows] = SlotState.PREFILLING
        known, done = np.zeros(64, np.int32), np.zeros(64, np.int32)
        known[rows], done[rows] = 700, 500
        slots = SimpleNamespace(
            may_decode=lambda: state == SlotState.DECODING,
            num_known=known,
            num_prefilled=done,
            max_width=1,
            num_micro_batches=1,
        )
        self.context: Any = SimpleNamespace(
            config=InferenceConfig(**{"max_tokens": 900, "max_requests": 64, **config}),
            graph_shapes=GraphShapes(mixed_step_tokens=measured),
            waiting=SimpleNamespace(num_known=waits),
            scheduler=SimpleNamespace(prefilling=[rows], prefill_limit=123),
            slots=slots,
        )

    def limit(self) -> int:
        return PromptShare(self.context).limit()


@pytest.mark.parametrize(
    ("measured", "asked", "waits", "limit"),
    [
        (256, None, 0, 256 - 40),
        (256, 300, 0, 300 - 40),
        (None, 300, 100, 300 - 40),
        (256, None, 800, SHARE * 1000),
        (256, None, 5000, 900),
        (80, None, 0, SHARE * 200),
        (None, None, 5000, 123),
    ],
)
def test_limits(measured: int | None, asked: int | None, waits: int, limit: float) -> None:
    """200 tokens of a prompt that has begun wait, and 40 rows decode."""
    assert Books(measured, waits, 40, mixed_step_tokens=asked).limit() == limit


def test_a_limit_fills_a_captured_shape() -> None:
    books = Books(256, 800, 40)
    sizes = {size: (0, 64) for size in (256, 384, 512)}
    books.context.graph_shapes = GraphShapes((64,), sizes, is_packed=True, mixed_step_tokens=256)
    assert books.limit() == 512 - 40, "of 500 that might be"


def test_without_prompts_the_limit_stays() -> None:
    books = Books(256, 0, 40)
    books.context.scheduler.prefilling = []
    assert books.limit() == 123


def test_prompts_always_go_on() -> None:
    books = Books(41, 0, 40)
    books.context.slots.num_prefilled[40] = 690
    assert books.limit() == 41, "the least, and the setting is smaller"
    books = Books(100, 0, 63)
    books.context.slots.num_prefilled[63] = 690
    assert books.limit() == LEAST_PREFILL_TOKENS


@pytest.mark.parametrize("tokens", [0, -1, 2.5, "8", True])
def test_a_bad_number_is_refused(tokens: Any) -> None:
    with pytest.raises(ConfigurationError, match="mixed_step_tokens="):
        InferenceConfig(mixed_step_tokens=tokens)


SETTINGS = {
    "max_sequence_length": 420, "max_tokens": 400, "max_requests": 4, "num_kv_blocks": 128,
    "block_size_tokens": 16, "mixed_step_tokens": 40,
}  # fmt: skip


def long_prompts() -> list[list[int]]:
    return random_prompts(9, (3, 90, 200, 330, 70, 280, 310, 370, 350))


class Chunks(EngineListener):
    """Prompt tokens of steps with decode rows."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def launched(self, plan: StepPlan | None) -> None:
        if plan is not None and plan.num_decode and not plan.dims.is_decode_only:
            self.counts.append(plan.dims.prefill_tokens)


def test_tokens_are_the_same(lookahead: int) -> None:
    answers, most = [], []
    for tokens in (None, 40):
        settings = {**SETTINGS, "mixed_step_tokens": tokens, "lookahead": lookahead}
        engine, chunks = make_engine(MODEL, **settings), Chunks()
        engine.listeners.append(chunks)
        ended = engine.generate(long_prompts(), [greedy(40)] * 9)
        answers.append([request.generated_tokens for request in ended])
        most.append(chunks.counts)
        engine.close()
    assert answers[0] == answers[1]
    assert min(map(len, most)) > 0
    assert most[1] != most[0], "prompts are divided"


@pytest.mark.parametrize("lookahead", [1, 2])
def test_requests_whose_last_token_is_on_its_way_take_no_room(lookahead: int) -> None:
    """Four rows decode, and four prompts of one token's answer fill what is left of a step."""
    settings = {**SETTINGS, "mixed_step_tokens": 4 + 4 * 4, "lookahead": lookahead}
    settings["max_requests"] = 24
    engine, chunks = make_engine(MODEL, **settings), Chunks()
    prompts = iter(random_prompts(3, (4,) * 44))
    for number in range(4):
        engine.add_request(number, next(prompts), greedy(30))
    engine.step_modern()
    engine.listeners.append(chunks)
    for step in range(10):
        for number in range(4):
            engine.add_request(100 + 4 * step + number, next(prompts), greedy(1))
        engine.step_modern()
    drain(engine)
    assert chunks.counts == [16] * 10
    engine.close()


def test_followers_plan_by_their_leaders_measurement() -> None:
    settings = {**SETTINGS, "mixed_step_tokens": None}
    engines = [make_engine(MODEL, **settings, check_ranks_agree=True) for _ in range(2)]
    for engine, measured in zip(engines, (48, 96)):
        engine.context.graph_shapes.mixed_step_tokens = measured
    following = FollowingEngine(*engines)
    leader, follower = engines[0], following.engine
    leader.generate(long_prompts(), [greedy(40)] * 9)
    drain(leader)
    leader.close()
    following.join()
    steps = leader.stats()["steps"], follower.stats()["steps"]
    follower.close()
    assert following.error is None, following.error
    assert steps[0] == steps[1]


def test_a_recording_replays_what_was_measured(tmp_path: Path) -> None:
    engine = make_engine(MODEL, **{**SETTINGS, "mixed_step_tokens": None})
    engine.context.graph_shapes.mixed_step_tokens = 40
    recorder = Recorder(engine, tmp_path / "run.rec")
    engine.generate(long_prompts(), [greedy(40)] * 9)
    drain(engine)
    recorder.close()
    steps = engine.statistics.steps
    engine.close()
    recording = load_recording(tmp_path / "run.rec")
    limits = {event.tokens for event in recording.events if isinstance(event, PrefillLimit)}
    assert len(limits) > 2
    assert Replay(recording).run() == steps
