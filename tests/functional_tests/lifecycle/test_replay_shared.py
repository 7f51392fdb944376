"""Runs whose requests share blocks: recorded, replayed plan for plan, simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_model import VOCABULARY
from harness import greedy, make_engine
from schedules import run_schedule
from shared_prompts import SharedPrompts, sharing_schedule

from megatron_async.config import InferenceConfig
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.profiling.arrival_trace import TraceRequest
from megatron_async.simulation import simulator
from megatron_async.simulation.device_times import MACHINES
from megatron_async.simulation.model_less import ModelLessEngine
from megatron_async.simulation.model_shape import ModelShape
from megatron_async.simulation.recorder import Recorder
from megatron_async.simulation.recording import Launched, RecordingError, load_recording
from megatron_async.simulation.replay import Replay

SCHEDULES = 6


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_replays_with_the_same_cache(
    tiny_model: torch.nn.Module, tmp_path: Path, lookahead: int, remembers: bool
) -> None:
    """Pauses, evictions and aborts of requests that share blocks."""
    hits = evictions = 0
    for seed in range(SCHEDULES):
        path, schedule = tmp_path / f"{seed}.rec", sharing_schedule(seed, 1)
        engine = make_engine(tiny_model, **{**schedule.config, "lookahead": lookahead})
        shared = SharedPrompts(engine, remembers)
        recorder = Recorder(engine, path)
        run_schedule(engine, schedule)
        recorder.close()
        engine.close()
        recording = load_recording(path)
        replay = Replay(recording)
        found = SharedPrompts(replay.engine, remembers)
        assert replay.run() == engine.statistics.steps
        assert found.hits == shared.hits
        launches = [event for event in recording.events if isinstance(event, Launched)]
        size = schedule.config["block_size_tokens"]
        assert sum(launched.cached[0] for launched in launches) == shared.hits * size
        if shared.hits:
            with pytest.raises(
                RecordingError, match=r"`Scheduler.cached_blocks` that the recorded"
            ):
                Replay(recording).run()
        hits, evictions = hits + shared.hits, evictions + engine.context.scheduler.evictions
    assert hits > 0
    assert evictions > 0


@pytest.mark.parametrize("is_kept", [False, True], ids=["found", "kept"])
def test_a_replay_without_the_cache_says_so(
    tiny_model: torch.nn.Module, tmp_path: Path, is_kept: bool
) -> None:
    """Blocks that a cache finds, and blocks that it keeps and nobody has asked for yet, which other
    requests do not get."""
    path, prompt = tmp_path / "run.rec", list(range(13))
    engine = make_engine(tiny_model, lookahead=0, block_size_tokens=4, max_requests=2)
    SharedPrompts(engine, remembers=is_kept)
    recorder = Recorder(engine, path)
    engine.add_request(0, prompt, greedy(3 if is_kept else 9))
    engine.step_modern()
    engine.generate([[20, 21, 22] if is_kept else prompt], greedy(9))
    recorder.close()
    engine.close()
    step, tokens, blocks = (3, 0, 3) if is_kept else (1, 12, 0)
    numbers = f"found 0 tokens in the cache and it keeps 0 blocks, instead of {tokens} and {blocks}"
    with pytest.raises(RecordingError, match=f"step {step} differs .*requests {numbers}"):
        Replay(load_recording(path)).run()


def test_a_simulation_shares_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found in the cache takes no time, and is not counted as computed twice."""
    prompt = np.arange(600, dtype=np.int32) % VOCABULARY
    trace = [TraceRequest(at, prompt, 20) for at in (0.0, 0.01, 0.02)]
    shape = ModelShape.of_architecture(DUMMY_SHAPES["llama-3.1-8b"], "bfloat16")
    config = InferenceConfig(
        num_kv_blocks=130, block_size_tokens=16, max_requests=4, max_tokens=1024, lookahead=1
    )
    machine = MACHINES["h200:llama-3.1-8b"]
    plain = simulator.simulate(trace, shape, config, machine)
    caches: list[SharedPrompts] = []

    def sharing(*args: Any) -> ModelLessEngine:
        engine = ModelLessEngine(*args)
        caches.append(SharedPrompts(engine))
        return engine

    monkeypatch.setattr(simulator, "ModelLessEngine", sharing)
    cached = simulator.simulate(trace, shape, config, machine)
    assert caches[0].hits == 2 * (600 // 16)
    assert (plain.recomputed_tokens, cached.recomputed_tokens) == (0, 0)
    assert cached.served.requests[0].ttft_s == plain.served.requests[0].ttft_s
    for with_cache, without in zip(cached.served.requests[1:], plain.served.requests[1:]):
        assert with_cache.ttft_s < 0.8 * without.ttft_s
