"""Proof that the CPU prepares step N+1 while the device runs step N."""

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.observe.timeline import Timeline
from tests.support.harness import drain, greedy, make_engine, make_model, random_prompts

MEDIUM = ModelArchitecture("llama", 8, 512, 8, 4, 64, 1536, 2048, max_position_embeddings=1024)
"""A step of it takes some 10 ms, twenty times what the CPU needs to prepare one."""
ROWS = 4
DECODE_STEPS = 40
STEADY_STEPS = range(3, DECODE_STEPS - 2)


@pytest.fixture(scope="module")
def medium_model() -> torch.nn.Module:
    return make_model(MEDIUM)


def run_steady_decode(
    model: torch.nn.Module, lookahead: int
) -> tuple[DynamicInferenceEngine, Timeline]:
    """A batch that decodes together, from the first step to the last."""
    timeline = Timeline()
    engine = make_engine(
        model,
        timeline=timeline,
        lookahead=lookahead,
        num_kv_blocks=64,
        block_size_tokens=16,
        max_requests=ROWS,
    )
    for number, prompt in enumerate(random_prompts(0, [8] * ROWS, MEDIUM.vocab_size)):
        engine.add_request(number, prompt, greedy(DECODE_STEPS))
    drain(engine)
    return engine, timeline


def prepared_during(timeline: Timeline) -> tuple[list[int], list[int]]:
    """Steady decode steps during which the next step was prepared: the steps N whose `device_step`
    span holds `prepare_step` of N + 1 from beginning to end; and those where that holds of the time
    from the end of `device_step` N - 1, when the device, whose queue holds step N, turns to it. (On
    a busy machine a CPU device's thread may get its turn a little after the host, a GPU would not
    wait.)"""
    prepare = timeline.select("cpu", "prepare_step")
    device = timeline.select("device", "device_step")
    within, queued = [], []
    for step in STEADY_STEPS:
        before, span, following = device[step - 1], device[step], prepare[step + 1]
        in_time = following.end_us <= span.end_us
        if in_time and following.start_us >= span.start_us:
            within.append(step)
        if in_time and following.start_us >= before.end_us:
            queued.append(step)
    return within, queued


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_overlap_ratio(medium_model: torch.nn.Module, lookahead: int) -> None:
    engine, _ = run_steady_decode(medium_model, lookahead)
    stats = engine.stats()
    assert stats["steps"] == DECODE_STEPS
    assert stats["overlap_ratio"] == (1.0 if lookahead else 0.0)
    assert stats["zombie_rows"] == 0  # length limits are known before a launch


def test_next_step_is_prepared_during_this_one(medium_model: torch.nn.Module) -> None:
    _, timeline = run_steady_decode(medium_model, lookahead=1)
    within, queued = prepared_during(timeline)
    assert len(queued) >= 0.9 * len(STEADY_STEPS), queued
    assert within, timeline.spans
    launches = timeline.select("cpu", "launch_step")
    prepares = timeline.select("cpu", "prepare_step")
    waits = timeline.select("cpu", "resolve")
    for step in STEADY_STEPS:  # launched, then the one before awaited, then the next prepared
        assert launches[step].end_us <= waits[step - 1].start_us
        assert waits[step - 1].end_us <= prepares[step + 1].start_us


def test_serial_prepares_after_the_step(medium_model: torch.nn.Module) -> None:
    _, timeline = run_steady_decode(medium_model, lookahead=0)
    assert prepared_during(timeline) == ([], [])
