"""Logged steps: what a line says, and that nobody waits for it."""

import logging
import re

import pytest

from megatron_async import LLM, SamplingParams
from megatron_async.devices.cpu import CpuEvent, current_stream_name

LINE = re.compile(
    r"step (\d+): device ([\d.]+) ms, (\d+) rows, (\d+) tokens/s, overlap ([\d.]+), "
    r"slots (\d+)/4, KV blocks (\d+)/8, (\d+) waiting"
)
PROMPTS = [[1, 2, 3], [4], [5, 6], [7]]


def run(caplog, interval, lookahead=1, prompts=PROMPTS):
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
    lines, stats = run(caplog, 5, prompts=[*PROMPTS, [8, 9]])
    assert lines[0][7] == 1  # waits for a slot
    assert min(line[4] for line in lines) == 0.8  # and its first step followed none
    assert [line[0] for line in lines] == list(range(4, int(stats["steps"]), 5))


def test_logging_waits_for_nothing(caplog, monkeypatch):
    """The host waits for as many recorded events with a line for each step as without: a step's.

    A late launch asks for the event of the step before it a second time.
    """
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
