"""Runs whose requests share blocks: recorded, replayed plan for plan, simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.config import InferenceConfig
from megatron_async.errors import RecordingError
from megatron_async.lab import simulator
from megatron_async.lab.arrival_trace import TraceRequest
from megatron_async.lab.device_times import MACHINES
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.recorder import Recorder
from megatron_async.lab.recording import Launched, load_recording
from megatron_async.lab.replay import Replay
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.planning.prefix_cache import NOTHING, PrefixCache
from tests.support.attention_model import VOCABULARY
from tests.support.harness import greedy, make_engine, make_model
from tests.support.schedules import run_schedule, sharing_schedule

SCHEDULES = 8


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_replays_find_the_same(tiny_model: torch.nn.Module, tmp_path: Path, lookahead: int) -> None:
    """Pauses, evictions and aborts of requests that share blocks."""
    hits = evictions = 0
    for seed in range(SCHEDULES):
        path, schedule = tmp_path / f"{seed}.rec", sharing_schedule(seed, 1)
        config = {**schedule.config, "lookahead": lookahead, "enable_prefix_caching": True}
        engine = make_engine(tiny_model, **config)
        recorder = Recorder(engine, path)
        run_schedule(engine, schedule)
        recorder.close()
        engine.close()
        recording, stats = load_recording(path), engine.stats()
        replay = Replay(recording)
        assert replay.run() == engine.statistics.steps
        assert replay.engine.stats()["prefix_cache_hits"] == stats["prefix_cache_hits"]
        launches = [event for event in recording.events if isinstance(event, Launched)]
        found = sum(launched.cached[0] for launched in launches)
        assert found == stats["prefix_cache_hits"]
        hits, evictions = hits + found, evictions + stats["evictions"]
    assert hits > 0
    assert evictions > 0


@pytest.mark.parametrize("changes", [{}, {"prefix_caching_mamba_gb": 4e-4}], ids=str)
def test_replays_share_states(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The replay, which has no model, counts the same rows of states."""
    model, path = make_model(DUMMY_SHAPES["tiny-hybrid"]), tmp_path / "run.rec"
    engine = make_engine(
        model, block_size_tokens=16, max_requests=3, max_tokens=300, enable_prefix_caching=True,
        **changes,
    )  # fmt: skip
    recorder, text = Recorder(engine, path), [n * n % 97 for n in range(400)]
    for number in range(6):
        prompt = [*text[: 130 + 40 * number], number]
        engine.add_request(number, prompt, greedy(140))
        for _ in range(30):
            engine.step_modern()
    while engine.has_unfinished_requests():
        engine.step_modern()
    recorder.close()
    engine.close()
    replay = Replay(load_recording(path))
    assert replay.run() == engine.statistics.steps
    stats, again = engine.stats(), replay.engine.stats()
    assert stats["prefix_cache_snapshot_hits"] > 0
    for name in ("hits", "snapshots", "snapshot_hits", "snapshot_evictions", "lost_no_state"):
        assert stats[f"prefix_cache_{name}"] == again[f"prefix_cache_{name}"], name


def test_another_cache_is_noticed(
    tiny_model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompt = tmp_path / "run.rec", list(range(13))
    engine = make_engine(
        tiny_model, lookahead=0, block_size_tokens=4, max_requests=2, enable_prefix_caching=True
    )
    recorder = Recorder(engine, path)
    for request_id in range(2):
        engine.add_request(request_id, prompt, greedy(3))
        while engine.has_unfinished_requests():
            engine.step_modern()
    recorder.close()
    engine.close()
    monkeypatch.setattr(PrefixCache, "look_up", lambda *_: NOTHING)
    with pytest.raises(RecordingError, match=r"found 0 tokens in the cache .* instead of 12 and"):
        Replay(load_recording(path)).run()


def test_a_simulation_shares_blocks() -> None:
    """What is found in the cache takes no time, and is not counted as computed twice."""
    prompt = np.arange(600, dtype=np.int32) % VOCABULARY
    trace = [TraceRequest(at, prompt, 20) for at in (0.0, 0.01, 0.02)]
    shape = ModelShape.of_architecture(DUMMY_SHAPES["llama-3.1-8b"], "bfloat16")
    config = InferenceConfig(
        num_kv_blocks=130, block_size_tokens=16, max_requests=4, max_tokens=1024, lookahead=1,
        enable_prefix_caching=False,
    )  # fmt: skip
    machine = MACHINES["h200:llama-3.1-8b"]
    plain = simulator.simulate(trace, shape, config, machine)
    cached = simulator.simulate(trace, shape, replace(config, enable_prefix_caching=True), machine)
    assert (plain.recomputed_tokens, cached.recomputed_tokens) == (0, 0)
    assert cached.served.requests[0].ttft_s == plain.served.requests[0].ttft_s
    for with_cache, without in zip(cached.served.requests[1:], plain.served.requests[1:]):
        assert with_cache.ttft_s < 0.8 * without.ttft_s
