"""Listeners of an engine: each moment in its order, logged steps, and a loop of one's own of the
engine's public parts."""

import inspect
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_async import LLM, DynamicInferenceEngine, SamplingParams
from megatron_async.devices.cpu import CpuEvent, current_stream_name
from megatron_async.engine.listener import EngineListener
from megatron_async.engine.step_loop import StepLoop
from tests.unit_tests.engine.engines_under_test import GREEDY, PROMPTS


class Notes(EngineListener):
    """Writes down what it is told, into a list that it shares."""

    def __init__(self, name, told):
        self.name = name
        self.told = told

    def added(self, request):
        self.told.append((self.name, "added", request.request_id))

    def aborted(self, request_id):
        self.told.append((self.name, "aborted", request_id))

    def evicted_all(self):
        self.told.append((self.name, "evicted_all", None))

    def launching(self, plan):
        self.told.append((self.name, "launching", plan.step))

    def launched(self, plan):
        self.told.append((self.name, "launched", None if plan is None else plan.step))

    def resolved(self, step):
        self.told.append((self.name, "resolved", step.plan.step))

    def ended(self, request, reason):
        self.told.append((self.name, "ended", request.request_id))


def of(told, name, moment):
    return [what for who, when, what in told if (who, when) == (name, moment)]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_all_are_told_in_order(make_engine, lookahead):
    engine, told = make_engine(lookahead=lookahead), []
    engine.listeners += [Notes("first", told), Notes("second", told)]
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(number, prompt, GREEDY)
    engine.step_modern()
    engine.abort_request(0)
    engine.suspend(free_kv_cache=True)
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    first, second = told[::2], told[1::2]
    assert {who for who, *_ in first} == {"first"}
    assert [what for _, *what in first] == [what for _, *what in second]
    others = list(range(1, len(PROMPTS)))
    assert of(told, "first", "added") == [0, *others]
    assert of(told, "first", "aborted") == [0]
    assert of(told, "first", "evicted_all") == [None]
    steps = list(range(engine.statistics.steps))
    assert [step for step in of(told, "first", "launched") if step is not None] == steps
    assert of(told, "first", "launching") == steps
    assert of(told, "first", "resolved") == steps
    assert sorted(of(told, "first", "ended")) == others
    engine.listeners.pop()
    heard = len(of(told, "second", "added"))
    engine.generate(PROMPTS[:1], GREEDY)
    assert len(of(told, "second", "added")) == heard
    assert len(of(told, "first", "added")) == heard + 1


LINE = re.compile(
    r"step (\d+): device ([\d.]+) ms, (\d+) rows, (\d+) tokens/s, overlap ([\d.]+), "
    r"slots (\d+)/4, KV blocks (\d+)/8, (\d+) waiting"
)
LOGGED = [[1, 2, 3], [4], [5, 6], [7]]


def run(caplog, interval, lookahead=1, prompts=LOGGED):
    """Serve prompts; return the fields of each line, and the engine's figures."""
    caplog.clear()
    greedy = SamplingParams(temperature=0.0, num_tokens_to_generate=20, termination_id=-1)
    settings = {"num_kv_blocks": 8, "block_size_tokens": 16, "max_requests": 4, "device": "cpu"}
    with (
        caplog.at_level(logging.INFO, "megatron_async"),
        LLM("dummy:tiny", lookahead=lookahead, logging_step_interval=interval, **settings) as llm,
    ):
        llm.generate(prompts, greedy)
    lines = [r.getMessage() for r in caplog.records if r.name == "megatron_async"]
    fields = [LINE.fullmatch(line) for line in lines]
    assert all(fields), lines
    return [tuple(float(f) for f in m.groups()) for m in fields], llm.engine.stats()


def test_no_interval_no_line(caplog):
    assert run(caplog, 0)[0] == []


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_every_step_is_logged_and_overlaps(caplog, lookahead):
    lines, stats = run(caplog, 1, lookahead)
    steps = int(stats["steps"])
    assert [line[0] for line in lines] == list(range(steps))
    assert stats["overlap_ratio"] == (1.0 if lookahead else 0.0)
    assert all(line[4] == (1.0 if lookahead else 0.0) for line in lines[1:])
    assert all(line[1] > 0 for line in lines)
    assert (lines[0][2], lines[0][5], lines[0][6], lines[0][7]) == (4, 4, 4, 0)
    assert any(line[3] > 0 for line in lines)


def test_every_fifth_step(caplog):
    lines, stats = run(caplog, 5, prompts=[*LOGGED, [8, 9]])
    assert lines[0][7] == 1  # waits for a slot
    assert min(line[4] for line in lines) == 0.8  # and its first step followed none
    assert [line[0] for line in lines] == list(range(4, int(stats["steps"]), 5))


def test_logging_waits_for_nothing(caplog, monkeypatch):
    """The host waits for as many recorded events with a line for each step as without: a step's. A
    late launch asks for the event of the step before it a second time."""
    wait, waits = CpuEvent.wait, set()

    def counted(event):
        if current_stream_name() is None:
            waits.add(event.point)
        wait(event)

    monkeypatch.setattr(CpuEvent, "wait", counted)
    _, without = run(caplog, 0)
    plain = len(waits)
    _, stats = run(caplog, 1)
    assert plain == without["steps"]
    assert len(waits) - plain == stats["steps"]


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
