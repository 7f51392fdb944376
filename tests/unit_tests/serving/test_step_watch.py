"""What somebody sees who watches an engine, and that nothing is left of it behind a window."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from megatron_async import LLM, SamplingParams
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.observe.timeline import MOST_SPANS, STEPS, Span, StepWindow, Timeline
from megatron_async.serving import engine_verbs
from megatron_async.serving.engine_verbs import StepWatch


@pytest.fixture(scope="module", params=[0, 1, 2], ids="lookahead {}".format)
def engine(request: pytest.FixtureRequest) -> Iterator[DynamicInferenceEngine]:
    sizes = {"num_kv_blocks": 32, "block_size_tokens": 16}
    with LLM("dummy:tiny", device="cpu", **sizes, lookahead=request.param) as llm:
        yield llm.engine


def run(engine: DynamicInferenceEngine, tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, termination_id=-1)
    return engine.generate([[1, 2, 3]], params)[0].generated_tokens


def test_a_window_has_its_steps_and_ends(engine: DynamicInferenceEngine) -> None:
    expected = run(engine, 40)

    async def watched() -> tuple[dict, dict]:
        watch = StepWatch(engine)
        first = watch.look()
        assert isinstance(engine.tracer.timeline, StepWindow)
        assert run(engine, 40) == expected  # more steps than a window has
        assert engine.tracer.timeline is None  # nobody has looked meanwhile
        return first, watch.look()

    first, second = asyncio.run(watched())
    assert first["spans"] == []
    assert second["steps"] - first["steps"] == 40
    assert second["generated_tokens"] - first["generated_tokens"] == 40
    assert second["lookahead"] == engine.lookahead
    of_device = [step for lane, name, step, _, _ in second["spans"] if lane == 1]
    assert STEPS - engine.lookahead <= len(set(of_device)) <= STEPS + 1
    assert of_device[0] == first["steps"]
    assert min(start for _, _, _, start, _ in second["spans"]) == 0
    assert all(length >= 0 for *_, length in second["spans"])
    names = {name for lane, name, *_ in second["spans"] if lane == 0}
    assert {"prepare_step", "launch_step", "resolve", "update_requests", "emit"} <= names
    told = dict(second["reasons"])
    assert told[first["steps"]] == "after_idle"
    if engine.lookahead == 0:
        assert set(told.values()) == {"after_idle", "serial"}
        assert len(told) == len(set(of_device))
    else:
        assert len(told) == 1


def test_who_goes_away_costs_nothing_any_more(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_verbs, "LEASE_S", 0.05)

    async def watched() -> None:
        StepWatch(engine).look()
        assert engine.tracer.timeline is not None
        await asyncio.sleep(0.2)  # an idle engine has no steps that would end the window

    asyncio.run(watched())
    assert engine.tracer.timeline is None


def test_a_profile_under_way_is_looked_at_and_left_alone(engine: DynamicInferenceEngine) -> None:
    async def watched() -> dict:
        profile = engine.tracer.timeline = Timeline()
        watch = StepWatch(engine)
        run(engine, 4)
        told = watch.look()
        assert engine.tracer.timeline is profile
        engine.tracer.timeline = None
        return told

    assert len([1 for lane, *_ in asyncio.run(watched())["spans"] if lane == 1]) == 4


def test_a_window_keeps_no_more_than_it_may() -> None:
    ended = []
    window = StepWindow(lambda: ended.append(1))
    for step in range(MOST_SPANS + 5):
        window.add(Span("cpu", "resolve", step, 0.0, 1.0))
    assert (len(window.spans), window.dropped) == (MOST_SPANS, 5)
    for step in range(STEPS):
        assert not ended
        window.add(Span("cpu", "step", step, 0.0, 1.0))
    assert ended == [1]
