"""Events of requests, and numbers for wandb."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_async.compat.conversions.events import TokenTimes
from megatron_async.errors import ConfigurationError
from megatron_async.planning.step_output import StepOutput
from tests.support.compat_trio import PROMPTS, compat_config, compat_engine, drive, greedy_params
from tests.support.compat_trio import make_compat_engine as make

FACTS = {
    "blocks_total", "blocks_hashed_total", "blocks_hashed_active", "pre_fwd_active_token_count",
    "pre_fwd_step_count",
}  # fmt: skip


@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_each_token_has_an_event(tiny_model: torch.nn.Module, mode: str) -> None:
    with compat_engine(
        tiny_model, async_sched_mode=mode, track_generated_token_events=True
    ) as engine:
        found = drive(engine, PROMPTS, greedy_params(6))
        assert len(engine._times._reports) <= 1, "nobody is left who needs them"
    for request in found:
        events = request.events
        kinds = [event.type.name for event in events]
        assert kinds == ["ADD_ENGINE", "ADD_CONTEXT", *["GENERATED_TOKEN"] * 6, "FINISH"]
        tokens = events[2:-1]
        assert [event.payload["token_id"] for event in tokens] == request.generated_tokens
        assert all(event.payload.keys() >= FACTS for event in tokens)
        times = [event.timestamp for event in tokens]
        assert times == sorted(times)
        assert len(set(times)) >= 5, "a time for each step"
        json.dumps([event.serialize() for event in events])
    used = [event.payload["blocks_hashed_total"] for event in found[2].events[2:-1]]
    assert max(used) > 0


def test_events_of_tokens_over_evictions(tiny_model: torch.nn.Module) -> None:
    with compat_engine(
        tiny_model, track_generated_token_events=True, kv_cache_management_mode="recompute"
    ) as engine:
        found = drive(engine, PROMPTS, greedy_params(8), suspend_resume_interval=4)
    for request in found:
        ids = [e.payload["token_id"] for e in request.events if e.type.name == "GENERATED_TOKEN"]
        assert ids == request.generated_tokens


def test_without_tracking_tokens_have_none(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        (found,) = drive(engine, PROMPTS[:1], greedy_params(3))
    assert [event.type.name for event in found.events] == ["ADD_ENGINE", "ADD_CONTEXT", "FINISH"]


@pytest.mark.parametrize("tracks", [False, True])
def test_pauses_and_evictions(tiny_model: torch.nn.Module, tracks: bool) -> None:
    prompts = ["x" * 14] * 6
    with compat_engine(tiny_model) as engine:
        expected = drive(engine, prompts, greedy_params(60))
    with compat_engine(
        tiny_model, num_kv_blocks=8, track_paused_request_events=tracks,
        track_generated_token_events=True,
    ) as engine:  # fmt: skip
        found = drive(engine, prompts, greedy_params(60))
        assert engine.evicted_request_count > 0
    assert [r.generated_tokens for r in found] == [r.generated_tokens for r in expected]
    kinds = [event.type.name for request in found for event in request.events]
    assert ("PAUSE" in kinds) is tracks
    assert kinds.count("EVICT") == engine.evicted_request_count
    for request in found:
        ids = [e.payload["token_id"] for e in request.events if e.type.name == "GENERATED_TOKEN"]
        assert ids == request.generated_tokens


def test_times_of_several_tokens_a_row() -> None:
    import numpy as np

    def output(ids: Sequence[int], rows: Sequence[int]) -> StepOutput:
        none = np.empty(0, dtype=np.int64)
        flags = np.zeros(len(ids), dtype=np.bool_)
        return StepOutput(
            step=0, slots=none, request_ids=np.array(ids), tokens=np.zeros(len(rows), np.int32),
            rows=np.array(rows, dtype=np.int64), is_first=flags, stopped=flags, ended=flags,
            failed_slots=none, zombie_rows=0,
        )  # fmt: skip

    times = TokenTimes()
    times.add(output([7], [0]), {"step": 0})  # of the request that had the id before
    since = times.number
    times.add(output([5, 7], [0, 1, 1]), {"step": 1})
    times.add(output([5], [0]), {"step": 2})
    times.add(output([7, 5], [0, 0, 0, 1]), {"step": 3})
    found = times.events_of(7, [10, 11, 12, 13, 14, 15], since)
    assert [event.payload["token_id"] for event in found] == [10, 11, 12, 13, 14, 15]
    assert [event.payload["step"] for event in found] == [1, 1, 3, 3, 3, 3]
    times.forget_before(times.number)
    assert not times._reports


class Recorder:
    """What wandb's module offers."""

    __name__ = "wandb"

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, metrics: dict[str, Any], commit: bool) -> None:
        assert commit
        self.lines.append(metrics)


def test_numbers_for_wandb_every_few_steps(tiny_model: torch.nn.Module) -> None:
    writer = Recorder()
    with compat_engine(tiny_model, metrics_writer=writer, logging_step_interval=3) as engine:
        assert engine.metrics_writer is writer
        drive(engine, PROMPTS, greedy_params(8))
    assert writer.axes == [("inference/*", "inference/inference_step")]
    assert [line["inference/inference_step"] for line in writer.lines] == [3, 6, 9]
    for line in writer.lines:
        assert line["inference/step_time_s"] > 0
        assert line["inference/waiting_queue_len"] == 0
        assert line["inference/total_blocks"] == engine.context.blocks.total
        assert line["inference/max_requests"] == 8
    assert [line["inference/total_requests_dict_size"] for line in writer.lines] == [3, 4, 4]
    first = writer.lines[1]
    share = 100 * first["inference/allocated_blocks"] / first["inference/total_blocks"]
    assert first["inference/allocated_utilization"] == pytest.approx(share)
    assert first["inference/allocated_blocks"] > 0


def test_without_an_interval_nothing_is_written(tiny_model: torch.nn.Module) -> None:
    writer = Recorder()
    with compat_engine(tiny_model, metrics_writer=writer) as engine:
        drive(engine, PROMPTS, greedy_params(4))
    assert writer.lines == writer.axes == []


def test_a_writer_that_cannot_write_is_refused(tiny_model: torch.nn.Module) -> None:
    with pytest.raises(ConfigurationError, match="metrics_writer"):
        make(tiny_model, compat_config(metrics_writer=object(), logging_step_interval=1))


def test_drafts_and_shared_blocks_are_counted(tiny_model: torch.nn.Module) -> None:
    writer = Recorder()
    with compat_engine(tiny_model) as engine:
        expected = drive(engine, ["ab" * 20] * 4, greedy_params(30))
    with compat_engine(
        tiny_model, metrics_writer=writer, logging_step_interval=1, enable_prefix_caching=True,
        num_speculative_tokens=2, speculative_method="ngram",
    ) as engine:  # fmt: skip
        found = drive(engine, ["ab" * 20] * 4, greedy_params(30))
        drafted = engine.stats()["drafted_tokens"]
    assert [r.generated_tokens for r in found] == [r.generated_tokens for r in expected]
    assert [request.num_cached_tokens for request in found] == [0, 32, 32, 32]
    last = writer.lines[-1]
    assert last["inference/prefix_cache_blocks_matched"] == 6
    if drafted:
        assert last["inference/spec_decode_tokens_proposed"] > 0
