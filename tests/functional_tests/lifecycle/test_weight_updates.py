"""A weight update is a step: what an engine says is what one says that stops for each change."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, Status
from megatron_async.devices import Chaos, CpuDevice
from megatron_async.errors import EngineStopped, UpdateError
from megatron_async.planning.prefix_cache import PrefixCache
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.capturing_cpu import CapturingCpu
from tests.support.harness import (
    Job,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
)
from tests.support.hybrid_model import HybridAttentionModel
from tests.support.late_device import LateDevice
from tests.support.mtp_model import MtpHybridModel, MtpModel
from tests.support.patience import PATIENCE_S
from tests.support.staged_weights import StagedWeights, Stopped, by_token, copy_weights

Kind = Callable[[int], torch.nn.Module]
DRAFTS = {"num_speculative_tokens": 2, "speculative_method": "mtp"}
KINDS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "float32": (lambda seed: make_model(seed=seed), {}),
    "attention": (AttentionModel, {}),
    "hybrid": (HybridAttentionModel, {}),
    "drafts": (MtpModel, DRAFTS),
    "hybrid drafts": (MtpHybridModel, DRAFTS),
}
LENGTHS = (3, 40, 11, 1, 26)


def jobs_of(count: int = 14) -> list[Job]:
    prompts = random_prompts(5, LENGTHS, VOCABULARY)
    params = [greedy(count), greedy(count, temperature=0.8, seed=3), greedy(count)]
    return [Job(prompt, params[n % 3]) for n, prompt in enumerate(prompts)]


def update(engine: DynamicInferenceEngine, model: torch.nn.Module, number: int, *order: Any) -> Any:
    """Stage the weights of `model` and have them committed: the future."""
    engine.updating.stage(number, StagedWeights(engine, model))
    return engine.updating.commit(number, *order)


def engine_of(kind: str, seed: int = 0, **config: Any) -> DynamicInferenceEngine:
    make, settings = KINDS[kind]
    room = {"max_requests": 6, "max_tokens": 26, "block_size_tokens": 4}
    return make_engine(make(seed), **{**room, **settings, **config})


@pytest.mark.pairs
@pytest.mark.parametrize("policy", ["keep", "recompute", "abort"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_an_engine_that_stops(kind, policy, lookahead):
    models = {version: KINDS[kind][0](seed) for version, seed in ((None, 0), ("b", 5), (3, 7))}
    device = CpuDevice(Chaos(1)) if lookahead == 2 else None
    engine = engine_of(kind, lookahead=lookahead, enable_prefix_caching=True, device=device)
    room = {"max_requests": 1, "lookahead": 0, "max_sequence_length": 64}
    stopped = Stopped(make_engine(KINDS[kind][0](0), **room), models)
    jobs, steps, done = jobs_of(), 0, []
    futures = [engine.add_request(n, job.prompt, job.params) for n, job in enumerate(jobs)]
    while engine.has_unfinished_requests() or steps < 8:
        if steps in (4, 7):
            version = "b" if steps == 4 else 3
            done.append(update(engine, models[version], steps, version, policy))
        engine.step_modern()
        steps += 1
    assert [each.result().epoch for each in done] == [1, 2]
    mixed = 0
    for number, future in enumerate(futures):
        request = future.result()
        assert (request.status, request.error) == (Status.COMPLETED, None)
        assert request.finish_reason in ("length", "weight_update")
        versions, cache = by_token(request.weight_versions), request.kv_versions
        again = [first for _, first, _ in request.weight_versions[1:]]
        again = again if policy == "recompute" else []
        assert request.generated_tokens == stopped.tokens(jobs[number], number, versions, again)
        mixed += len(request.weight_versions) > 1
        prompt = len(request.prompt_tokens)
        if policy == "recompute":
            assert [version for version, *_ in cache] == versions[-1:]
        else:
            chosen = request.weight_versions
            assert [version for version, *_ in cache] == [version for version, *_ in chosen]
            assert [e[1] for e in cache[1:]] == [e[1] + prompt - 1 for e in chosen[1:]]
        assert by_token(cache)[-1:] == versions[-1:]
        assert len(by_token(cache)) == prompt + len(versions) - 1
    assert policy == "abort" or mixed > 1
    assert policy != "abort" or done[0].result().aborted > 0
    # New requests: those of a fresh engine with the new weights.
    fresh = engine_of(kind, 7)
    after = [engine.generate([job.prompt], greedy(9))[0] for job in jobs]
    alone = [fresh.generate([job.prompt], greedy(9))[0] for job in jobs]
    assert [r.generated_tokens for r in after] == [r.generated_tokens for r in alone]
    assert after[0].weight_versions == [(3, 0, 9)]
    drain(engine)
    drain(fresh)
    assert engine.stats()["weight_updates"] == 2
    if kind == "drafts" and policy == "keep":
        stats = engine.stats()
        assert 0 < stats["drafted_tokens_of_old_weights"] < stats["drafted_tokens"] / 2


def test_no_hit_across_epochs(monkeypatch):
    """Break it: the cache is not reset."""
    found = _said_again()
    assert found[0] == found[1]
    monkeypatch.setattr(PrefixCache, "reset", lambda cache: None)
    found = _said_again()
    assert found[0] != found[1]


def _said_again() -> tuple[list[int], list[int]]:
    engine = engine_of("attention", enable_prefix_caching=True, lookahead=1)
    prompt = jobs_of()[1].prompt
    engine.add_request(0, prompt, greedy(12))
    for _ in range(6):  # it is still running, and its blocks are cached
        engine.step_modern()
    update(engine, AttentionModel(5), 1, "new")
    found = engine.generate([prompt], greedy(8))[0].generated_tokens
    engine.close()
    return found, engine_of("attention", 5).generate([prompt], greedy(8))[0].generated_tokens


def test_log_probs_of_a_prompt_are_all_of_the_new_weights():
    """The prompt is half computed when the update comes."""
    params = greedy(2, return_log_probs=True)
    engine, prompt = engine_of("attention", max_tokens=8, lookahead=1), jobs_of()[1].prompt
    future = engine.add_request(0, prompt, params)
    for _ in range(3):
        engine.step_modern()
    done = update(engine, AttentionModel(5), 1, "new")
    drain(engine)
    assert (done.result().recomputed, future.result().weight_versions) == (1, [("new", 0, 2)])
    alone = engine_of("attention", 5).generate([prompt], params)[0]
    assert future.result().prompt_log_probs == pytest.approx(alone.prompt_log_probs)
    assert future.result().generated_log_probs == pytest.approx(alone.generated_log_probs)


def test_an_idle_a_paused_and_a_suspended_engine_commit_at_once():
    engine = engine_of("attention", lookahead=2)
    done = update(engine, AttentionModel(5), 1, "b")
    assert engine.has_unfinished_requests()
    engine.step_modern()
    assert done.result()[:3] == (0, 1, "b")
    assert not engine.has_unfinished_requests()
    future = engine.add_request(0, [1, 2, 3], greedy(6))
    for _ in range(4):
        engine.step_modern()
    for number, stop in ((2, engine.pause), (3, engine.suspend)):
        stop()
        known = len(engine.context.slots.tokens_since(0, 0))
        done = update(engine, AttentionModel(number), number, number)
        engine.step_modern()
        assert done.done()
        with pytest.raises(EngineStopped):
            engine.step_modern()
    engine.resume()
    engine.unpause()
    drain(engine)
    assert future.result().weight_versions == [("b", 0, known), (3, known, 6)]


def test_a_label_is_published_and_nothing_else():
    engine = engine_of("attention", lookahead=2, enable_prefix_caching=True)
    prompt, expected = jobs_of()[1].prompt, []
    expected = engine.generate([prompt], greedy(9))[0].generated_tokens
    future = engine.add_request(0, prompt, greedy(9))
    for _ in range(4):
        engine.step_modern()
    launched = engine.context.slots.at_least(0) - len(prompt)
    engine.updating.label("x")
    drain(engine)
    request = future.result()
    assert request.generated_tokens == expected
    assert request.weight_versions == [(None, 0, launched), ("x", launched, 9)]
    assert (engine.weight_version, engine.weight_epoch) == ("x", 0)
    assert engine.stats()["prefix_cache_hits"] > 30


def test_a_torn_round_leaves_the_old_version_serving():
    engine = engine_of("attention", lookahead=1)
    future = engine.add_request(0, [1, 2, 3], greedy(12))
    stage = StagedWeights(engine, AttentionModel(5))
    engine.step_modern()
    engine.updating.stage(1, stage)
    engine.updating.fail(1, "the sender died")
    staged, done = engine.updating.staged(1), engine.updating.commit(1, "b")
    drain(engine)
    for each in (staged, done):
        with pytest.raises(UpdateError, match="the sender died"):
            each.result(0)
    assert stage.was_dropped
    assert not stage.was_committed
    alone = engine_of("attention").generate([[1, 2, 3]], greedy(12))[0]
    assert future.result().generated_tokens == alone.generated_tokens
    assert future.result().weight_versions == [(None, 0, 12)]
    for late in (
        lambda: engine.updating.commit(1, "b"),
        lambda: engine.updating.stage(1, StagedWeights(engine, AttentionModel(5))),
    ):
        with pytest.raises(UpdateError, match="the sender died"):
            late()
    engine.updating.fail(1, "again")  # says nothing new
    with pytest.raises(UpdateError, match="'later' is none of keep, recompute, abort"):
        engine.updating.commit(2, "b", "later")
    assert engine.updating.begin(is_whole=True) == 2


def test_copies_that_break_off_let_no_step_run_until_whole_weights_come():
    engine = engine_of("attention", lookahead=1)
    future = engine.add_request(0, [1, 2, 3], greedy(12))
    engine.step_modern()
    engine.updating.stage(1, StagedWeights(engine, AttentionModel(5), MemoryError("none left")))
    done = engine.updating.commit(1, "b")
    engine.step_modern()
    with pytest.raises(UpdateError, match="broke off in its copies: MemoryError"):
        done.result(0)
    with pytest.raises(EngineStopped, match=r"until new weights have come \(round 1 of weights"):
        engine.step_modern()
    update(engine, AttentionModel(5), 2, "b", "recompute")
    drain(engine)
    assert future.result().weight_versions[-1][0] == "b"
    assert engine.weight_version == "b"


def test_weights_are_written_in_place_while_the_engine_is_frozen():
    engine = engine_of("attention", lookahead=2)
    future = engine.add_request(0, [1, 2, 3], greedy(12))
    for _ in range(3):
        engine.step_modern()
    engine.updating.write_in_place(1, engine)
    engine.loop.drain()
    engine.step_modern()  # reports
    with pytest.raises(EngineStopped, match="written in place"):
        engine.step_modern()
    copy_weights(engine.controller.inference_wrapped_model.model, AttentionModel(5))
    engine.updating.stage(1, StagedWeights(engine, AttentionModel(5)))
    engine.updating.commit(1, "b")
    drain(engine)
    assert [version for version, *_ in future.result().weight_versions] == [None, "b"]


@pytest.mark.parametrize("moves", [False, True])
def test_captured_steps(moves):
    """Weights that lie elsewhere are captured again, when the steps in flight are booked."""
    engine = make_engine(
        make_model(), device=CapturingCpu(), lookahead=2, max_requests=4, max_tokens=16
    )
    stage, graphs = StagedWeights(engine, make_model(seed=5)), engine.controller.graphs
    if moves:
        commit = stage.commit
        stage.commit = lambda: commit() or True  # type: ignore[method-assign]
    before = dict(graphs._graphs)
    future = engine.add_request(0, [1, 2, 3], greedy(12))
    for _ in range(4):
        engine.step_modern()
    engine.updating.stage(1, stage)
    engine.updating.commit(1, "b")
    drain(engine)
    assert all((before[key] is graph) != moves for key, graph in graphs._graphs.items())
    models = {None: make_model(), "b": make_model(seed=5)}
    stopped = Stopped(make_engine(make_model(), lookahead=0), models)
    versions = by_token(future.result().weight_versions)
    assert len(set(versions)) == 2
    expected = stopped.tokens(Job([1, 2, 3], greedy(12)), 0, versions)
    assert future.result().generated_tokens == expected
    drained = engine.statistics.no_overlap
    assert engine.stats()["captured_steps"] > 5
    assert sum(drained.values()) == 1 + moves


def test_steps_that_may_be_taken_back_are_booked_first():
    engine = make_engine(AttentionModel(), lookahead=2, invalidation="rollback")
    future = engine.add_request(0, [1, 2, 3], greedy(12))
    for _ in range(4):
        engine.step_modern()
    assert len(engine.in_flight) == 2
    done = update(engine, AttentionModel(5), 1, "b")
    drain(engine)
    assert future.result().weight_versions == [(None, 0, 4), ("b", 4, 12)]
    assert done.result().step == 4
    assert engine.statistics.no_overlap["drained"] == 1


def test_an_engine_that_runs_on_another_thread_is_updated():
    engine, started, found = engine_of("attention", lookahead=1), threading.Event(), []
    ends = threading.Event()

    async def serve() -> None:
        task = asyncio.create_task(engine.run_engine())
        await asyncio.sleep(0.01)  # it sleeps
        started.set()
        await asyncio.to_thread(ends.wait, PATIENCE_S)
        found.append(await engine.add_request(0, [1, 2, 3], greedy(5)))
        task.cancel()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(PATIENCE_S)
    assert update(engine, AttentionModel(5), 1, "b").result(PATIENCE_S).version == "b"
    ends.set()
    thread.join(PATIENCE_S)
    assert found[0].weight_versions == [("b", 0, 5)]
    assert_all_is_back(engine)


def test_copies_that_a_signal_cuts_short_are_torn():
    engine = make_engine(AttentionModel(), device=LateDevice(), lookahead=2)
    future = engine.add_request(0, [1, 2, 3], greedy(12))
    for _ in range(4):
        engine.step_modern()
    engine.updating.stage(1, StagedWeights(engine, AttentionModel(5), KeyboardInterrupt()))
    done = engine.updating.commit(1, "b")
    with pytest.raises(KeyboardInterrupt):
        engine.step_modern()
    with pytest.raises(UpdateError, match="broke off in its copies: KeyboardInterrupt"):
        done.result(0)
    with pytest.raises(EngineStopped, match="until new weights have come"):
        engine.generate([[1]])
    update(engine, AttentionModel(5), 2, "c")
    drain(engine)
    assert [version for version, *_ in future.result().weight_versions] == [None, "c"]


def test_a_turn_that_is_cut_short_behind_an_update_loses_neither(monkeypatch):
    """All requests are prefilled again, with the new weights."""
    engine = make_engine(AttentionModel(), device=LateDevice(), lookahead=2)
    future = engine.add_request(0, [1, 2, 3], greedy(12))
    for _ in range(4):
        engine.step_modern()
    known = len(engine.context.slots.tokens_since(0, 0))
    done = update(engine, AttentionModel(5), 1, "b")
    monkeypatch.setattr(
        engine.context, "reset_prefix_cache", lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        engine.step_modern()
    monkeypatch.undo()
    drain(engine)
    assert done.result(0).version == engine.weight_version == "b"
    request = future.result()
    assert request.weight_versions == [(None, 0, known), ("b", known, 12)]
    assert request.kv_versions == [("b", 0, 14)]
    models = {None: AttentionModel(), "b": AttentionModel(5)}
    stopped = Stopped(make_engine(AttentionModel(), lookahead=0), models)
    job = Job([1, 2, 3], greedy(12))
    versions = by_token(request.weight_versions)
    assert request.generated_tokens == stopped.tokens(job, 0, versions, [known])
