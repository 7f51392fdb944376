"""A loop of one's own, of the engine's public parts: `launch_step` and `resolve_step`; and
the page of the engine's loop."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine
from megatron_async.engine.step_loop import StepLoop
from tests.unit_tests.engine.engines_under_test import GREEDY, PROMPTS


@pytest.fixture(params=[0, 1, 2])
def engine(make_engine, request):
    return make_engine(lookahead=request.param)


def add_all(engine):
    return [engine.add_request(number, prompt, GREEDY) for number, prompt in enumerate(PROMPTS)]


def finish(engine):
    while engine.has_unfinished_requests():
        engine.step_modern()


def test_it_says_the_same_tokens(engine, expected):
    futures, launched, booked = add_all(engine), 0, []
    while engine.has_unfinished_requests():
        if engine.launch_step() is not None:
            launched += 1
        else:
            booked += engine.resolve_step()
        engine.requests.take_ended()
    assert [future.result().generated_tokens for future in futures] == expected
    assert [output.step for output in booked] == list(range(launched))


def test_a_step_comes_behind_those_in_flight_while_there_is_room(engine):
    add_all(engine)
    launched = [engine.launch_step() for _ in range(engine.lookahead + 1)]
    assert list(engine.in_flight) == launched
    assert engine.launch_step() is None  # the rings of buffers are full
    assert list(engine.in_flight) == launched
    (output,) = engine.resolve_step()
    assert output.step == launched[0].plan.step
    assert list(engine.in_flight) == launched[1:]
    assert engine.launch_step() is engine.in_flight[-1]
    finish(engine)


def test_where_nothing_can_be_done_nothing_is(engine):
    assert engine.launch_step() is None
    with pytest.raises(IndexError):
        engine.resolve_step()
    add_all(engine)
    engine.pause()
    assert engine.launch_step() is None
    engine.unpause()
    assert engine.launch_step() is not None
    finish(engine)
    engine.close()
    assert engine.launch_step() is None


def test_the_loop_of_the_page_is_the_code() -> None:
    """docs/architecture.md. Break it: another name on the page, or a line of `async_step` less."""
    page = Path("docs/architecture.md").read_text(encoding="utf-8")
    _, whole, _, launch, *_ = page[page.index("## The loop") :].split("```")

    def lines(text: str) -> list[str]:
        return [code for line in text.splitlines() if (code := line.split("#")[0].strip())]

    def code(function: Any) -> list[str]:
        return lines(inspect.getsource(function))

    step = lines(whole)
    for function, waited in (
        ("step_modern", "loop.resolve("),
        ("async_step", "await loop.resolve_async("),
    ):
        found = code(getattr(DynamicInferenceEngine, function))
        begin = found.index(step[0])
        expected = [line.replace("loop.resolve(", waited) for line in step]
        assert found[begin : begin + len(step)] == expected, function
    parts = code(StepLoop.launch_next) + code(StepLoop._launch)
    places = []
    for line in lines(launch):
        begin = line.split("...")[0]
        places.append(next(i for i, part in enumerate(parts) if part.startswith(begin)))
    assert places == sorted(places)
