"""Recorded runs replay without their model, plan for plan, also where requests share blocks; what
differs is named."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import DynamicInferenceEngine, InferenceConfig, SamplingParams, StructuredOutput
from megatron_async.errors import RecordingError
from megatron_async.lab import simulator
from megatron_async.lab.arrival_trace import TraceRequest
from megatron_async.lab.device_times import MACHINES
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.recorder import Recorder
from megatron_async.lab.recording import Added, Launched, TextEnd, Updated, load_recording
from megatron_async.lab.replay import Replay, describe_state
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.planning import dynamic_context
from megatron_async.planning.prefix_cache import NOTHING, PrefixCache
from tests.support.attention_model import VOCABULARY
from tests.support.harness import (
    TINY,
    EngineFactory,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
)
from tests.support.letter_tokenizers import Letters, make_ascii_tokenizer
from tests.support.schedules import random_schedule, run_schedule, sharing_schedule
from tests.support.staged_weights import StagedWeights


def record_schedule(
    make_tiny_engine: EngineFactory, seed: int, path: Path, **config: Any
) -> DynamicInferenceEngine:
    """Play a random schedule, recorded."""
    schedule = random_schedule(seed)
    engine = make_tiny_engine(**{**schedule.config, **config})
    recorder = Recorder(engine, path)
    run_schedule(engine, schedule)
    recorder.close()
    return engine


def test_replays_plan_for_plan(make_tiny_engine, tmp_path, lookahead):
    pressed = 0
    for seed in range(6):
        path = tmp_path / f"{seed}.rec"
        engine = record_schedule(make_tiny_engine, seed, path, lookahead=lookahead)
        recording = load_recording(path)
        assert Replay(recording).run() == engine.statistics.steps
        pressed += engine.context.scheduler.evictions > 0
    assert pressed, "no schedule came under memory pressure"


@pytest.mark.parametrize("shape", ["tiny-hybrid", "tiny-gated-delta"])
def test_hybrids_replay(tmp_path, shape, lookahead):
    """With chunks that end where scans are cut, and requests that pause and are evicted."""
    path, architecture = tmp_path / "run.rec", DUMMY_SHAPES[shape]
    engine = make_engine(
        make_model(architecture), lookahead=lookahead, max_requests=4, max_tokens=150,
        block_size_tokens=8, num_kv_blocks=45, paused_buffer_size_gb=5e-5,
    )  # fmt: skip
    recorder = Recorder(engine, path)
    prompts = random_prompts(3, (300, 20, 5, 140), architecture.vocab_size)
    engine.generate(prompts, [greedy(30)] * len(prompts))
    drain(engine)
    recorder.close()
    stats = engine.stats()
    engine.close()
    assert min(stats["pauses"], stats["evictions"]) > 0
    assert Replay(load_recording(path)).run() == stats["steps"]


def test_another_schedule_is_noticed(make_tiny_engine, tmp_path, monkeypatch):
    path = tmp_path / "run.rec"
    record_schedule(make_tiny_engine, 3, path)
    recording = load_recording(path)
    # A scheduler that serves the last request first.
    monkeypatch.setattr(dynamic_context, "rank_of", lambda arrival, priority: -arrival)
    with pytest.raises(RecordingError, match=r"step \d+ differs from the recording, first in '"):
        Replay(recording).run()


@pytest.mark.parametrize(
    ("index", "field"), [(0, "slots"), (2, "kv_at_most"), (3, "widths"), (6, "block_updates")]
)
def test_the_first_difference_is_named(make_tiny_engine, tmp_path, index, field):
    path = tmp_path / "run.rec"
    record_schedule(make_tiny_engine, 1, path)
    recording = load_recording(path)
    launches = [e for e in recording.events if isinstance(e, Launched) and e.step is not None]
    for launched in launches[4:6]:
        launched.checksums[index] ^= 1
    message = f"step 4 differs from the recording, first in '{field}'"
    with pytest.raises(RecordingError, match=message):
        Replay(recording).run()


def test_another_end_is_noticed(make_tiny_engine, tmp_path):
    path = tmp_path / "run.rec"
    record_schedule(make_tiny_engine, 1, path)
    recording = load_recording(path)
    assert recording.counters is not None
    recording.counters["generated_tokens"] += 1
    with pytest.raises(RecordingError, match="but generated_tokens is"):
        Replay(recording).run()


def test_another_configuration_is_refused(make_tiny_engine, tmp_path):
    path = tmp_path / "run.rec"
    engine = record_schedule(make_tiny_engine, 1, path, lookahead=1)
    recording, config = load_recording(path), engine.context.config
    config.choices = "shipped"
    assert Replay(recording, config).run() > 0
    config.lookahead = 2
    with pytest.raises(RecordingError, match=r"lookahead=2, but the run was recorded with 1"):
        Replay(recording, config)


def test_state_at_a_step(make_tiny_engine, tmp_path):
    path = tmp_path / "run.rec"
    engine = make_tiny_engine(
        max_requests=2, block_size_tokens=4, num_kv_blocks=20, max_tokens=64, lookahead=1
    )
    recorder = Recorder(engine, path)
    for number, prompt in enumerate(random_prompts(0, (5, 9, 3))):
        engine.add_request(number, prompt, greedy(10))
    for _ in range(4):
        engine.step_modern()
    expected = describe_state(engine)
    drain(engine)
    recorder.close()
    recording = load_recording(path)
    # The engine had resolved step 2 when it was asked; the replay stops as step 3 is planned.
    replay = Replay(recording)
    assert replay.run(until_step=3) == 4
    found = describe_state(replay.engine)
    assert "2 of 2 slots" in found
    assert "waiting: request 2 (3 tokens)" in found
    assert "in flight: step 2 (2 decode rows, 0 chunks), step 3 (2 decode rows, 0 chunks)" in found
    tables = [[line.split()[9:] for line in text.splitlines()[2:4]] for text in (found, expected)]
    assert tables[0] == tables[1] != [[], []]
    with pytest.raises(RecordingError, match="there is no step 999"):
        Replay(recording).run(until_step=999)


def test_stop_words_replay_without_a_tokenizer(make_tiny_engine, tmp_path):
    path = tmp_path / "run.rec"
    engine = make_tiny_engine(lookahead=1, tokenizer=Letters())
    recorder = Recorder(engine, path)
    words = [chr(200 + token) for token in range(0, TINY.vocab_size, 4)]
    prompts = random_prompts(5, (3, 17, 8))
    requests = engine.generate(prompts, [greedy(40, stop_words=words)] * 3)
    drain(engine)
    recorder.close()
    assert {request.finish_reason for request in requests} == {"stop_word"}
    recording = load_recording(path)
    assert sum(isinstance(event, TextEnd) for event in recording.events) == 3
    assert Replay(recording).run() == engine.statistics.steps


def test_all_sampling_parameters_replay(make_tiny_engine, tmp_path):
    path = tmp_path / "run.rec"
    engine = make_tiny_engine(lookahead=1, tokenizer=Letters(), max_tokens=16)
    recorder = Recorder(engine, path)
    words = [chr(200 + token) for token in range(0, TINY.vocab_size, 4)]
    params = [
        greedy(30, return_log_probs=True, top_n_logprobs=2),
        greedy(30, stop_words=words, min_tokens=7),
        greedy(30, stop_token_ids=list(range(40)), min_tokens=9),
        greedy(30, logit_bias={np.int64(3): 50.0, 5: -1.5}, bad_words=[chr(203), [4, 5]]),
        SamplingParams(
            temperature=0.9, top_k=9, top_p=0.8, min_p=0.01, seed=np.int64(7),
            frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.2,
            num_tokens_total=40, termination_id=8,
        ),
    ]  # fmt: skip
    requests = engine.generate(random_prompts(5, (30, 4, 8, 5, 9)), params)
    drain(engine)
    recorder.close()
    assert [request.error for request in requests] == [None] * 5
    assert min(len(requests[1].generated_tokens), len(requests[2].generated_tokens)) >= 7
    assert Replay(load_recording(path)).run() == engine.statistics.steps


def test_structured_output_replays(make_tiny_engine, tmp_path, lookahead):
    """Requests held to a grammar are scheduled apart, and end where it ends."""
    path = tmp_path / "run.rec"
    engine = make_tiny_engine(lookahead=lookahead, tokenizer=make_ascii_tokenizer())
    recorder = Recorder(engine, path)
    outputs = [StructuredOutput(regex="[a-f]{5,9}"), StructuredOutput(choice=["red", "blue"]), None]
    params = [greedy(20, structured_output=output) for output in outputs]
    requests = engine.generate(random_prompts(5, (3, 17, 8)), params)
    drain(engine)
    recorder.close()
    assert requests[1].generated_text in ("red", "blue")
    recording = load_recording(path)
    ends = {e.request_id: e.reason for e in recording.events if isinstance(e, TextEnd)}
    assert ends[1] == "grammar" == requests[1].finish_reason
    added = {e.request_id: e for e in recording.events if isinstance(e, Added)}
    assert added[0].sampling_params().structured_output == outputs[0]
    assert Replay(recording).run() == engine.statistics.steps


def test_pauses_and_suspensions_replay(make_tiny_engine, tmp_path):
    path = tmp_path / "run.rec"
    engine = make_tiny_engine(lookahead=2, block_size_tokens=4)
    recorder = Recorder(engine, path)
    for number, prompt in enumerate(random_prompts(0, (5, 9, 3))):
        engine.add_request(number, prompt, greedy(30))
    for free_kv_cache in (False, True):
        for _ in range(5):
            engine.step_modern()
        engine.pause()
        engine.suspend(free_kv_cache)
        engine.add_request(10 + free_kv_cache, [1, 2, 3], greedy(8))
        engine.resume()
        engine.unpause()
    drain(engine)
    recorder.close()
    assert engine.context.scheduler.evictions == 4
    assert Replay(load_recording(path)).run() == engine.statistics.steps


def test_updates_replay(tiny_model: torch.nn.Module, tmp_path: Path, lookahead: int) -> None:
    """Break it: a replay does not reset the prefix cache."""
    path, prompts = tmp_path / "run.rec", random_prompts(3, (30, 20, 5, 30), VOCABULARY)
    engine = make_engine(
        tiny_model, lookahead=lookahead, max_requests=4, max_tokens=20, block_size_tokens=4,
        num_kv_blocks=40, enable_prefix_caching=True,
    )  # fmt: skip
    recorder = Recorder(engine, path)
    for step in range(12):
        engine.add_request(step, prompts[step % 4], greedy(9))
        if step in (3, 6, 9):
            engine.updating.stage(step, StagedWeights(engine, tiny_model))
            engine.updating.commit(step, f"v{step}", ("keep", "recompute", "abort")[step // 3 - 1])
        if step == 8:
            engine.updating.label("x")
        engine.step_modern()
    drain(engine)
    recorder.close()
    stats, recording = engine.stats(), load_recording(path)
    assert [e.policy for e in recording.events if isinstance(e, Updated)] == [
        "keep", "recompute", "label", "abort",
    ]  # fmt: skip
    assert stats["prefix_cache_hits"] > 20
    replay = Replay(recording)
    assert replay.run() == stats["steps"]
    assert replay.engine.weight_version == "v9"
    # A replay that passes updates over plans something else.
    recording.events = [e for e in recording.events if not isinstance(e, Updated)]
    with pytest.raises(RecordingError, match="step"):
        Replay(recording).run()


def test_rollback_is_not_recorded(make_tiny_engine, tmp_path):
    engine = make_tiny_engine(invalidation="rollback")
    with pytest.raises(RecordingError, match="invalidation='rollback' cannot be recorded"):
        Recorder(engine, tmp_path / "run.rec")


def test_what_happens_during_a_wait_replays(make_tiny_engine, tmp_path):
    """Requests that come and go while `async_step` waits, between a launch and a resolve."""
    path = tmp_path / "run.rec"
    engine = make_tiny_engine(lookahead=1, max_requests=3)
    recorder = Recorder(engine, path)
    prompts = random_prompts(2, (9,) * 12)

    async def serve() -> None:
        runner = asyncio.create_task(engine.run_engine())
        futures = []
        for number, prompt in enumerate(prompts):
            futures.append(engine.add_request(number, prompt, greedy(12)))
            await asyncio.sleep(0.002)
            if number % 4 == 3 and not futures[-1].done():
                engine.abort_request(number)
        await asyncio.gather(*futures)
        runner.cancel()

    asyncio.run(serve())
    drain(engine)
    recorder.close()
    recording = load_recording(path)
    assert Replay(recording).run() == engine.statistics.steps
    kinds = [type(event).__name__ for event in recording.events]
    inside = {("Launched", "Added", "Resolved"), ("Launched", "Aborted", "Resolved")}
    triples = set(zip(kinds, kinds[1:], kinds[2:]))
    assert inside & triples or ("Launched", "Added") in set(itertools.pairwise(kinds))


def test_a_failed_step_fails_again(make_tiny_engine, tmp_path, monkeypatch):
    path = tmp_path / "run.rec"
    engine = make_tiny_engine(lookahead=1)
    recorder = Recorder(engine, path)
    wrapper = engine.controller.inference_wrapped_model
    forward, calls = wrapper.forward, itertools.count()

    def fail_once(view: Any) -> Any:
        if next(calls) == 3:
            raise ValueError("a fault in layer 7")
        return forward(view)

    monkeypatch.setattr(wrapper, "forward", fail_once)
    results = engine.generate(random_prompts(1, (4, 5)), greedy(8))
    results += engine.generate(random_prompts(1, (4,)), greedy(8))
    drain(engine)
    recorder.close()
    assert [result.succeeded() for result in results] == [False, False, True]
    replay = Replay(load_recording(path))
    assert replay.run() == engine.statistics.steps
    assert replay.engine.statistics.failed_steps == 1


SCHEDULES = 8


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
    drain(engine)
    recorder.close()
    engine.close()
    replay = Replay(load_recording(path))
    assert replay.run() == engine.statistics.steps
    stats, again = engine.stats(), replay.engine.stats()
    assert stats["prefix_cache_snapshot_hits"] > 0
    for name in ("hits", "snapshots", "snapshot_hits", "snapshot_evictions", "lost_no_state"):
        assert stats[f"prefix_cache_{name}"] == again[f"prefix_cache_{name}"], name


def test_another_cache_is_noticed(tiny_model, tmp_path, monkeypatch):
    path, prompt = tmp_path / "run.rec", list(range(13))
    engine = make_engine(
        tiny_model, lookahead=0, block_size_tokens=4, max_requests=2, enable_prefix_caching=True
    )
    recorder = Recorder(engine, path)
    for request_id in range(2):
        engine.add_request(request_id, prompt, greedy(3))
        drain(engine)
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
