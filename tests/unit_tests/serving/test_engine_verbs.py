"""What an engine does when an administrator tells the service to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_async import LLM, SamplingParams
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.serving.engine_verbs import PROFILE_VARIABLE, do_verb
from tests.support.patience import PATIENCE_S

GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=6, termination_id=-1)


@pytest.fixture(scope="module")
def engine() -> Iterator[DynamicInferenceEngine]:
    with LLM("dummy:tiny", device="cpu", num_kv_blocks=32, block_size_tokens=16) as llm:
        yield llm.engine


def tokens(engine: DynamicInferenceEngine) -> list[int]:
    return engine.generate([list(range(1, 40))], GREEDY)[0].generated_tokens


def test_it_sleeps_and_wakes_to_the_same_tokens(engine: DynamicInferenceEngine) -> None:
    before = tokens(engine)
    value, failure = do_verb(engine, "r", "sleep", {})
    assert failure is None
    assert value["freed_bytes"] > 0
    assert engine.is_stopped
    assert do_verb(engine, "r", "wake", {}) == ({}, None)
    assert not engine.is_stopped
    assert tokens(engine) == before


def test_the_prefix_cache_is_forgotten(engine: DynamicInferenceEngine) -> None:
    tokens(engine)
    hits = engine.stats()["prefix_cache_hits"]
    tokens(engine)
    assert engine.stats()["prefix_cache_hits"] > hits
    hits = engine.stats()["prefix_cache_hits"]
    assert do_verb(engine, "r", "reset_prefix_cache", {}) == ({}, None)
    tokens(engine)
    assert engine.stats()["prefix_cache_hits"] == hits


def test_a_profile_is_written(
    engine: DynamicInferenceEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROFILE_VARIABLE, str(tmp_path))
    start, stop = {"action": "start"}, {"action": "stop"}
    _, failure = do_verb(engine, "../r", "profile", stop)
    assert failure is not None
    assert "start one" in failure[1]
    assert do_verb(engine, "../r", "profile", start) == ({}, None)
    _, failure = do_verb(engine, "../r", "profile", start)
    assert failure is not None
    assert "already" in failure[1]
    tokens(engine)
    value, failure = do_verb(engine, "../r", "profile", stop)
    assert failure is None
    for thread in threading.enumerate():
        if thread.name == "save-profile":
            thread.join(PATIENCE_S)
    (file,) = tmp_path.iterdir()  # a replica's name leads to no other folder
    assert value["file"] == str(file)
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"forward_pass", "sampling"} <= names
    assert engine.tracer.timeline is None


def test_what_cannot_be_done_is_told(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)
    for what, fields, part in (
        ("profile", {"action": "start"}, "--profile-dir"),
        ("profile", {"action": 5}, "action=5"),
        ("explode", {}, "explode"),
    ):
        value, failure = do_verb(engine, "r", what, fields)
        assert value == {}
        assert failure is not None
        assert part in failure[1]
