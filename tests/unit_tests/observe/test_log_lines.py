"""Lines of log: one form, one line each, whatever is in them; and how busy a service is."""

from __future__ import annotations

import logging
import re

import pytest

from megatron_async.observe.log_lines import LineFormatter, said_line
from megatron_async.serving.service_counters import LOAD_EVERY_S, LoadLines

FORM = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w -]+: [^\n]*")


def line(text: str, error: BaseException | None = None, thread: str = "MainThread") -> str:
    given = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.WARNING, "", 0, "said: %s", (text,), given)
    record.threadName = thread
    return LineFormatter("api-0").format(record)


@pytest.mark.parametrize(
    "text", ["plain", "a\nb", "\r\x1b[2J", "\x00\x85\u2028\u2029", "ü 漢 \U0001f642"]
)
def test_a_text_is_one_line(text: str) -> None:
    found = line(text)
    assert FORM.fullmatch(found)
    assert len(found.splitlines()) == 1
    assert " WARNING api-0: said: " in found
    assert found.isprintable()
    if text.isprintable():
        assert found.endswith(text)


def test_a_traceback_cannot_be_taken_for_a_line() -> None:
    try:
        raise ValueError("\x1b[2J\u2028bad\n2026-01-01 00:00:00,000 INFO api-0: all is well")
    except ValueError as error:
        first, *rest = line("x", error).split("\n")
    assert FORM.fullmatch(first)
    assert len(rest) >= 4
    assert all(one.startswith("    ") and one.isprintable() for one in rest)


def test_a_coordinator_in_a_thread_has_its_name() -> None:
    assert " WARNING coordinator: " in line("x", thread="coordinator")


def test_what_is_said_to_people_has_the_same_first_line() -> None:
    first, *rest = said_line("supervisor", "ready; try:\n  curl \\\n    x").split("\n")
    assert FORM.fullmatch(first)
    assert rest == ["  curl \\", "    x"]


def test_load_is_told_every_ten_seconds_while_there_is_any() -> None:
    def stats(unfinished: int, prompts: int, generated: int) -> dict[str, object]:
        engine = {"slots": 4, "waiting_requests": 1, "kv_blocks": 8, "kv_blocks_in_use": 2}
        replica = {"engine": engine, "unfinished_requests": unfinished}
        service = {"prompt_tokens": prompts, "generated_tokens": generated}
        return {"queued_requests": 0, "replicas": {"a": replica}, "service": service}

    lines = LoadLines(0.0)
    assert lines.line(stats(3, 0, 50), LOAD_EVERY_S - 0.1) == ""
    told = lines.line(stats(3, 20, 100), LOAD_EVERY_S)
    assert told.startswith("Load: 2 running, 1 waiting; 10.0 tokens/s generated, 2.0 prompt tok")
    assert told.endswith(" 2 of 8 KV blocks in use (25.0 %).")
    assert lines.line(stats(3, 20, 110), 1.5 * LOAD_EVERY_S) == ""
    told = lines.line(stats(0, 20, 110), 2 * LOAD_EVERY_S)
    assert told.startswith("Load: 0 running, 0 waiting; 1.0 tokens/s generated")
    assert lines.line(stats(0, 20, 110), 3 * LOAD_EVERY_S) == ""  # nothing happens
