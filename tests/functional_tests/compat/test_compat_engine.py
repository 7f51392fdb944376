"""Megatron's calls: what scripts, training loops and tests ask of engine, context, controller."""

import asyncio
import gc
import weakref

import pytest
import torch
from megatron.core.inference.config import InferenceConfig as MegatronConfig
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.inference.contexts.dynamic_context import (
    DynamicInferenceContext as MegatronContext,
)
from megatron.core.inference.engines import AbstractEngine
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine as MegatronEngine
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord, Status
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    DecodeOnly,
)
from megatron.core.inference.utils import InferenceMode

from tests.support.compat_trio import PROMPTS, compat_config, compat_engine, drive, greedy_params
from tests.support.compat_trio import make_compat_engine as make

KEYS = {"active_request_ids", "finished_request_records", "step_time", "cuda_graph_request_count"}


@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_a_step_reports_as_megatrons_does(tiny_model: torch.nn.Module, mode: str) -> None:
    with compat_engine(tiny_model, async_sched_mode=mode) as engine:
        engine.add_request(5, PROMPTS[0], greedy_params(3))
        engine.add_request(6, PROMPTS[1], greedy_params(6))
        active, finished, modes = [], [], []
        while engine.has_unfinished_requests():
            result = engine.step_modern()
            assert result.keys() >= KEYS
            assert type(result["active_request_ids"]) is list
            assert result["cuda_graph_request_count"] is None, "a CPU captures nothing"
            assert result["step_time"] > 0
            active.append(result["active_request_ids"])
            finished += result["finished_request_records"]
            modes.append(engine.decode_only)
            for request_id in active[-1]:
                assert engine.get_request(request_id).request_id == request_id
    assert [ids for ids in active if ids] == [[5, 6], [5, 6], [6], [6], [6]]
    assert [record.request_id for record in finished] == [5, 6]
    assert all(isinstance(record, DynamicInferenceRequestRecord) for record in finished)
    if mode == "legacy":
        assert modes == [DecodeOnly(False, False)] + [DecodeOnly(True, True)] * 5
    else:
        assert modes[0] == DecodeOnly(None, False)
        assert modes[1] == DecodeOnly(False, True)
        assert modes[2:-1] == [DecodeOnly(True, True)] * 4
        assert modes[-1] == DecodeOnly(True, None)


@pytest.mark.parametrize(("mode", "overlaps"), [("legacy", False), ("async", True)])
def test_counters(tiny_model: torch.nn.Module, mode: str, overlaps: bool) -> None:
    with compat_engine(tiny_model, async_sched_mode=mode) as engine:
        context = engine.context
        engine.reset()
        assert (context.step_count, context.lifetime_prefill_token_count) == (0, 0)
        found = drive(engine, PROMPTS[:2], greedy_params(5))
        assert context.step_count == 6, "the second request comes a step later"
        assert context.lifetime_prefill_token_count == sum(map(len, PROMPTS[:2]))
        assert (context.async_sched_step_count > 0) is overlaps
        assert context.async_sched_step_count == (5 if overlaps else 0)
        assert engine.finished_request_count == 2
        # The end of the first is not foreseen, so a step ahead has a row for nothing.
        stop = found[0].generated_tokens[1]
        drive(engine, PROMPTS[:1], greedy_params(5, termination_id=stop))
        assert context.async_sched_compaction_step_count == (1 if overlaps else 0)
        engine.reset()
        assert context.step_count == context.async_sched_step_count == 0
        assert context.lifetime_prefill_token_count == engine.finished_request_count == 0
        assert context.async_sched_compaction_step_count == 0
        assert drive(engine, PROMPTS[:2], greedy_params(5))[1].generated_tokens == (
            found[1].generated_tokens
        )


def test_a_reset_may_keep_the_prefix_cache_and_the_counters(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model, enable_prefix_caching=True) as engine:
        context = engine.context
        prompt = list(range(1, 2 * context.block_size_tokens + 2))
        drive(engine, [prompt], greedy_params(2))
        steps = context.step_count
        for keeps_cache, keeps_counters in ((True, True), (True, False), (False, True)):
            context.reset(keeps_cache, preserve_counters=keeps_counters)
            assert context.step_count == (steps if keeps_counters else 0)
            before = context.lifetime_prefill_token_count
            drive(engine, [prompt], greedy_params(2))
            computed = context.lifetime_prefill_token_count - before
            assert computed == (1 if keeps_cache else len(prompt))
            steps = context.step_count


def test_who_is_there(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model, max_requests=2) as engine:
        context, blocks = engine.context, engine.context.kv_block_allocator
        total = context.blocks.total
        assert (blocks.total_count, blocks.total_avail) == (total + 1, total)
        assert (blocks.active_count, blocks.paused_count) == (total, 0)
        for number, prompt in enumerate(PROMPTS[:3]):
            engine.add_request(number, prompt, greedy_params(20))
        assert list(engine.waiting_request_ids) == [0, 1, 2]
        engine.step_modern()
        assert list(engine.waiting_request_ids) == [2]
        assert context.total_request_count == context.get_active_request_count() == 2
        assert context.active_token_count == sum(map(len, PROMPTS[:2]))
        engine.step_modern()
        assert context.is_decode_only()
        assert (context.num_prefill_requests, context.num_decode_requests) == (0, 2)
        assert context.active_token_count == 2
        stats = context.get_kvcache_utilization_stats()
        assert stats["allocated_blocks"] == stats["active_unique_blocks"] == 2
        assert stats["allocated_utilization"] == 2 / total
        assert stats["block_count_avail"] == blocks.total_avail == total - 2
        assert blocks.get_total_used() == blocks.get_active_used() == 2
        assert blocks.get_paused_used() == 0
        assert (stats["active_request_count"], stats["paused_request_count"]) == (2, 0)
        shares = {"allocated_utilization", "active_utilization"}
        assert {name for name, value in stats.items() if isinstance(value, float)} == shares
        live = engine.get_request(0)
        assert live.status is Status.ACTIVE_AND_GENERATING_TOKENS
        assert len(live.generated_tokens) == 1
        engine.step_modern()
        assert engine.get_request(0) is live
        assert len(live.generated_tokens) == 2
        with pytest.raises(KeyError):
            engine.get_request(77)
        engine.reset()


def test_a_pool_share_for_paused_requests(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model, num_kv_blocks=16, paused_buffer_size_gb=4 * 4096 / 2**30) as e:
        blocks = e.context.kv_block_allocator
        assert (blocks.paused_count, blocks.active_count) == (4, 12)


def test_reset_removes_who_is_there(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model, max_requests=2, enable_prefix_caching=True) as engine:
        expected = drive(engine, PROMPTS, greedy_params(6))
        futures = [engine.add_request(n, p, greedy_params(90)) for n, p in enumerate(PROMPTS)]
        for _ in range(3):
            engine.step_modern()
        engine.suspend()
        engine.context.reset()  # of the context: of the whole engine
        assert engine.state is EngineState.RUNNING
        assert not engine.has_unfinished_requests()
        assert all(future.result()[0].failed() for future in futures)
        assert engine.context.blocks.cached == 0
        assert engine.step_modern()["finished_request_records"] == []
        again = drive(engine, PROMPTS, greedy_params(6))
    assert [r.generated_tokens for r in again] == [r.generated_tokens for r in expected]


def test_generate_gives_records_in_order(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model, max_requests=2) as engine:
        expected = drive(engine, PROMPTS, greedy_params(6))
        records = engine.generate(list(PROMPTS), greedy_params(6))
        assert all(type(record) is DynamicInferenceRequestRecord for record in records)
        found = [record.merge().generated_tokens for record in records]
        assert found == [request.generated_tokens for request in expected]
        (plain,) = engine.generate(["hello"])
        assert plain.merge().succeeded()


def test_step_legacy(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model, async_sched_mode="legacy") as engine:
        engine.add_request(0, PROMPTS[0], greedy_params(2))
        with pytest.warns(DeprecationWarning, match="step_modern"):
            active, finished, seconds = engine.step_legacy(greedy_params(2))
        assert ([r.request_id for r in active], finished) == ([0], [])
        assert seconds > 0
        with pytest.warns(DeprecationWarning, match="step_modern"):
            active, finished, _ = engine.step(greedy_params(2))
        assert (active, [r.generated_length for r in finished]) == ([], [2])


@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_run_engine_on_an_event_loop(tiny_model: torch.nn.Module, mode: str) -> None:
    with compat_engine(tiny_model, async_sched_mode=mode) as engine:
        expected = drive(engine, PROMPTS, greedy_params(6))

        async def serve() -> list[list[int]]:
            task = asyncio.create_task(engine.run_engine(loop=asyncio.get_running_loop()))
            futures = [engine.add_request(n, p, greedy_params(6)) for n, p in enumerate(PROMPTS)]
            records = [await future for future in futures]
            task.cancel()
            await task  # returns, as in Megatron
            return [record.merge().generated_tokens for record in records]

        assert asyncio.run(serve()) == [request.generated_tokens for request in expected]


def test_a_suspended_loop_waits_and_goes_on(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:

        async def serve() -> None:
            task = asyncio.create_task(engine.run_engine())
            future = engine.add_request(0, PROMPTS[0], greedy_params(60))
            while not engine.get_request(0).generated_tokens:
                await asyncio.sleep(0)
            reached = asyncio.create_task(engine.wait_until(EngineState.SUSPENDED))
            await asyncio.sleep(0)
            engine.suspend()
            await reached
            assert not task.done()
            assert engine.state is EngineState.SUSPENDED
            resumed = asyncio.create_task(engine.wait_until(EngineState.RESUMED))
            await asyncio.sleep(0.01)
            assert not resumed.done()
            engine.resume()
            await resumed
            assert len((await future)[0].generated_tokens) == 60
            with pytest.raises(ValueError, match="passes by"):
                await engine.wait_until(EngineState.SUSPENDING)
            task.cancel()
            await task

        asyncio.run(serve())


def test_inside_inference_mode(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        expected = drive(engine, PROMPTS, greedy_params(6, return_log_probs=True))
    with torch.inference_mode(), compat_engine(tiny_model) as engine:
        found = drive(engine, PROMPTS, greedy_params(6, return_log_probs=True))
    assert [r.generated_tokens for r in found] == [r.generated_tokens for r in expected]


def test_ours_pass_megatrons_isinstance(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        assert isinstance(engine, MegatronEngine)
        assert isinstance(engine, AbstractEngine)
        assert isinstance(engine.context, MegatronContext)
        assert isinstance(engine.context, BaseInferenceContext)
        assert engine.context.is_dynamic_batching()
        assert not engine.context.is_static_batching()
        assert not InferenceMode.is_active(), "only while a step runs"


def test_megatrons_own_configuration_makes_the_same_engine(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        expected = drive(engine, PROMPTS, greedy_params(6))
    plain = make(tiny_model, MegatronConfig(max_sequence_length=128, buffer_size_gb=0.01))
    found = drive(plain, PROMPTS, greedy_params(6))
    plain.close()
    assert plain.lookahead == 0, "LEGACY is Megatron's default"
    assert [r.generated_tokens for r in found] == [r.generated_tokens for r in expected]


def test_sampling_repeats_with_the_models_seed(tiny_model: torch.nn.Module) -> None:
    params = greedy_params(12, top_k=0, temperature=1.0)
    with compat_engine(tiny_model) as first, compat_engine(tiny_model) as second:
        once, twice = (drive(engine, PROMPTS, params) for engine in (first, second))
    before = tiny_model.config.inference_sampling_seed
    tiny_model.config.inference_sampling_seed = before + 1
    try:
        with compat_engine(tiny_model) as third:
            other = drive(third, PROMPTS, params)
    finally:
        tiny_model.config.inference_sampling_seed = before
    with compat_engine(tiny_model) as fourth:
        assert fourth.controller.sampling_rng.initial_seed() == before
        fourth.controller.sampling_rng.manual_seed(before + 1)
        seeded = drive(fourth, PROMPTS, params)
    tokens = [[r.generated_tokens for r in found] for found in (once, twice, other, seeded)]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]


def test_attributes_that_scripts_print(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        context = engine.context
        assert context.unified_memory_level == engine.unified_memory_level == 0
        assert (context.max_requests, context.max_tokens) == (8, 16384)
        assert context.cuda_graph_batch_dimensions_list == []
        assert context.cuda_graph_token_counts is None
        assert engine.capture_stats is None
        assert engine.create_cuda_graphs() is None
        assert not context.using_cuda_graph_this_step()
        assert context.config.materialize_only_last_token_logits is True
        assert str(context.kv_block_allocator).startswith("using: total 0/")
        with engine.suspend_resume_ctx("suspended", unified_memory_level=0):
            pass
        assert engine.evicted_request_count == 0
        assert engine.controller.detokenize(engine.controller.tokenizer, [104, 105, 127]) == "hi"
    asyncio.run(engine.shutdown())
    assert engine.state is EngineState.STOPPED


def test_verbose_logs_a_summary(tiny_model, caplog):
    with caplog.at_level("INFO", "megatron_async"):
        engine = make(tiny_model, compat_config(verbose=True))
    engine.close()
    assert "8 requests" in caplog.text
    assert "KV blocks" in caplog.text


def test_an_engines_memory_goes_with_its_last_reference(tiny_model: torch.nn.Module) -> None:
    engine = make(tiny_model, compat_config(track_generated_token_events=True))
    drive(engine, PROMPTS[:2], greedy_params(3))
    engine.close()
    gc.collect()
    gc.disable()
    try:
        parts = weakref.ref(engine), weakref.ref(engine.context)
        del engine
        assert [part() for part in parts] == [None, None], "without looking for cycles"
    finally:
        gc.enable()
