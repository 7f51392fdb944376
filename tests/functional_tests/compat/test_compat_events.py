"""Events of requests, numbers for wandb, errors; and suspend and resume as reinforcement learning
uses them: weights change in between, epochs say which weights made what."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts import dynamic_context as megatron_contexts
from megatron.core.inference.engines import dynamic_engine as megatron_engines
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async import errors
from megatron_async.compat.conversions.events import TokenTimes
from megatron_async.compat.inference import engines
from megatron_async.compat.inference.contexts import dynamic_context as contexts
from megatron_async.compat.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.compat.inference.engines import DynamicInferenceEngine
from megatron_async.errors import ConfigurationError, RequestError
from megatron_async.planning.step_output import StepOutput
from tests.support.compat_models import fill, gpt_model
from tests.support.compat_trio import PROMPTS, compat_config, compat_engine, drive, greedy_params
from tests.support.compat_trio import make_compat_engine as make
from tests.support.harness import drain, make_engine

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


PERSIST, RECOMPUTE = KVCacheManagementMode.PERSIST, KVCacheManagementMode.RECOMPUTE
OFFLOAD = KVCacheManagementMode.OFFLOAD
PROMPT = list(range(3, 45, 2))
TOKENS = 16


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("interval", [2, 3, 5])
def test_megatrons_loop_with_suspends(tiny_model, mode: str, interval: int):
    with compat_engine(tiny_model, kv_cache_management_mode=mode) as engine:
        expected = drive(engine, PROMPTS, greedy_params(8))
        found = drive(engine, PROMPTS, greedy_params(8), suspend_resume_interval=interval)
        evictions = engine.evicted_request_count
    assert [r.generated_tokens for r in found] == [r.generated_tokens for r in expected]
    kinds = [event.type.name for request in found for event in request.events]
    assert (evictions > 0) is ("EVICT" in kinds) is (mode == "recompute")


def test_memory_goes_back_unless_it_persists(tiny_model: torch.nn.Module) -> None:
    for mode in (PERSIST, OFFLOAD, RECOMPUTE):
        with compat_engine(tiny_model, kv_cache_management_mode=mode) as engine:
            engine.add_request(0, PROMPTS[0], greedy_params(5))
            engine.step_modern()
            freed = engine.suspend()
            assert (freed > 0) is (mode is not PERSIST)
            assert engine.suspend() == 0, "suspended already"
            engine.resume()
            engine.resume()  # nothing happens
            assert engine.state is EngineState.RUNNING


@contextmanager
def serving(model: Any, **fields: Any) -> Iterator[DynamicInferenceEngine]:
    with compat_engine(model, **fields) as engine:
        yield engine


def tokens_of(engine: DynamicInferenceEngine, prompt: list[int] = PROMPT) -> list[int]:
    (record,) = engine.generate([prompt], greedy_params(TOKENS))
    tokens: list[int] = record[0].generated_tokens
    return tokens


@pytest.fixture(scope="module")
def weights() -> tuple[list[int], list[int]]:
    """Tokens of a fresh engine with the weights of seed 0, and with those of seed 1."""
    found = []
    for seed in (0, 1):
        with serving(gpt_model(seed=seed)) as engine:
            found.append(tokens_of(engine))
    assert found[0] != found[1]
    assert all(len(set(tokens)) > 4 for tokens in found)
    return found[0], found[1]


@pytest.mark.parametrize("mode", [PERSIST, OFFLOAD, RECOMPUTE])
@pytest.mark.parametrize("caching", [False, True])
def test_weights_that_training_changed_in_place_are_served(
    weights: tuple[list[int], list[int]], mode: KVCacheManagementMode, caching: bool
) -> None:
    model = gpt_model(seed=0)
    with serving(model, kv_cache_management_mode=mode, enable_prefix_caching=caching) as engine:
        assert tokens_of(engine) == weights[0]
        for seed in (1, 0, 1):
            engine.suspend()
            fill(model, seed=seed)
            engine.resume()
            # The same prompt: a block that is found again would be the old weights'.
            assert tokens_of(engine) == weights[seed]


def half_way(engine: DynamicInferenceEngine, tokens: int) -> Any:
    """A request that has generated about so many tokens, its engine suspended."""
    future = engine.add_request(0, PROMPT, greedy_params(TOKENS))
    while len(engine.get_request(0).generated_tokens) < tokens:
        engine.step_modern()
    engine.suspend()
    return future


def test_a_running_request_goes_on_with_new_weights_over_its_old_keys_or_new_ones(weights):
    answers = {}
    for mode in (PERSIST, OFFLOAD, RECOMPUTE):
        model = gpt_model(seed=0)
        with serving(model, kv_cache_management_mode=mode) as engine:
            future = half_way(engine, 6)
            known = list(engine.get_request(0).generated_tokens)
            assert known == weights[0][: len(known)]
            fill(model, seed=1)
            engine.resume()
            while engine.has_unfinished_requests():
                engine.step_modern()
            answers[mode] = future.result()[0].generated_tokens
            assert answers[mode][: len(known)] == known, "booked tokens stay"
            # What new weights alone make of prompt and tokens so far.
            rest = engine.generate([PROMPT + known], greedy_params(TOKENS - len(known)))
            alone = known + rest[0][0].generated_tokens
        assert (answers[mode] == alone) is (mode is RECOMPUTE)
    assert answers[PERSIST] == answers[OFFLOAD] != answers[RECOMPUTE]


@pytest.mark.parametrize("mode", [PERSIST, RECOMPUTE])
def test_epochs(mode: KVCacheManagementMode) -> None:
    with serving(gpt_model(), kv_cache_management_mode=mode) as engine:
        before = engine.add_request(9, PROMPT, greedy_params(1))
        while engine.has_unfinished_requests():
            engine.step_modern()
        assert (before.result()[0].policy_epoch, before.result()[0].kv_cache_epoch) == (None, None)

        engine.set_generation_epoch(3)
        future = half_way(engine, 5)
        live = engine.get_request(0)
        assert live.policy_epoch == live.kv_cache_epoch == [(0, 3)]
        known = len(PROMPT) + len(live.generated_tokens)
        engine.set_generation_epoch(4)
        live = engine.get_request(0)
        assert live.policy_epoch == [(0, 3), (known - 1, 4)]
        engine.resume()
        while engine.has_unfinished_requests():
            engine.step_modern()
        request = future.result().merge()
        assert request.policy_epoch == [(0, 3), (known - 1, 4)]
        # With RECOMPUTE all keys and values are the new weights'.
        kept = mode is PERSIST
        assert request.kv_cache_epoch == ([(0, 3), (known - 1, 4)] if kept else [(0, 4)])
        after = engine.add_request(1, PROMPT, greedy_params(1))
        while engine.has_unfinished_requests():
            engine.step_modern()
        assert after.result()[0].policy_epoch == [(0, 4)]
        engine.reset()
        assert engine.weight_version is None


def test_an_epoch_told_after_a_recompute_counts_from_there(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model, kv_cache_management_mode=RECOMPUTE) as engine:
        engine.set_generation_epoch(1)
        future = half_way(engine, 3)
        engine.resume()
        engine.step_modern()  # it is admitted again, with the weights of epoch 1
        engine.set_generation_epoch(2)
        known = len(PROMPT) + len(engine.get_request(0).generated_tokens)
        known += len(engine.in_flight)  # what is launched is of epoch 1
        while engine.has_unfinished_requests():
            engine.step_modern()
        request = future.result()[0]
        assert request.policy_epoch == request.kv_cache_epoch == [(0, 1), (known - 1, 2)]


NAMES = (
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "ContextErrorFactory",
    "ContextOverflowError",
    "MaxSequenceLengthOverflowError",
    "RequestOverflowError",
    "TensorStateDeallocatedError",
    "TokenOverflowError",
    "get_mem_size_str",
)


def test_the_names_are_megatrons_own_classes() -> None:
    for name in NAMES:
        assert getattr(contexts, name) is getattr(megatron_contexts, name)
    assert engines.EngineSuspendedError is megatron_engines.EngineSuspendedError


OVERFLOWS = {
    "MaxSequenceLengthOverflowError": ("x" * 64, greedy_params(1), errors.SequenceTooLong),
    "TokenOverflowError": ("x" * 50, greedy_params(1), errors.PromptTooLong),
    "BlockOverflowError": ("x" * 20, greedy_params(40), errors.PoolTooSmall),
}


@pytest.mark.parametrize("name", list(OVERFLOWS))
def test_an_overflow_fails_its_request_with_megatrons_error(tiny_model, name: str):
    prompt, params, ours = OVERFLOWS[name]
    settings = {"max_sequence_length": 64, "max_tokens": 40, "num_kv_blocks": 3, "max_requests": 2}
    with compat_engine(tiny_model, **settings) as engine:
        (plain,) = drive(engine, PROMPTS[:1], greedy_params(3))
        failed, fine = drive(engine, [prompt, PROMPTS[0]], [params, greedy_params(3)])
    assert fine.generated_tokens == plain.generated_tokens
    assert (failed.failed(), failed.generated_tokens, failed.generated_text) == (True, [], "")
    assert [event.type.name for event in failed.events] == [
        "ADD_ENGINE", "ERROR_NONTRANSIENT", "FAIL",
    ]  # fmt: skip
    error = failed.events[1].payload
    assert isinstance(error, getattr(megatron_contexts, name))
    assert isinstance(error, ours)
    assert (error.request_id, error.is_transient) == (0, False)
    assert "raise" in str(error), "with a remedy"
    # Megatron's own code sends it and reads it.
    record = DynamicInferenceRequestRecord.from_request(failed)
    back = DynamicInferenceRequestRecord.deserialize(record.serialize())
    assert type(back[0].events[1].payload) is getattr(megatron_contexts, name)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        (greedy_params(0), "num_tokens_to_generate"),
        (greedy_params(2, top_n_logprobs=2), "return_log_probs"),
        (SamplingParams(num_tokens_to_generate=2, num_tokens_total=9), "num_tokens_total"),
        ({"top_k": 1}, "dict"),
        (greedy_params(2, top_p=1.5), "top_p"),
    ],
)
def test_other_bad_parameters_fail_their_request_alone(tiny_model, params: Any, word: str):
    with compat_engine(tiny_model) as engine:
        future = engine.add_request(7, PROMPTS[0], params)
        assert future.done()
        assert engine.has_unfinished_requests(), "it is still to be reported"
        result = engine.step_modern()
        (record,) = result["finished_request_records"]
    assert record is future.result()
    assert record[0].failed()
    error = record[0].events[1].payload
    assert isinstance(error, RequestError)
    assert isinstance(error, megatron_contexts.ContextOverflowError)
    assert word in str(error)
    assert record.serialize()["requests"][0]["events"][1]["payload"]["request_id"] == 7


def test_an_id_in_use_is_refused_and_its_request_goes_on(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        (plain,) = drive(engine, PROMPTS[:1], greedy_params(5))
        future = engine.add_request(4, PROMPTS[0], greedy_params(5))
        for bad in (4, "four", True):
            with pytest.raises(RequestError, match="request id"):
                engine.add_request(bad, PROMPTS[1], greedy_params(5))  # type: ignore[arg-type]
        drain(engine)
        assert future.result().merge().generated_tokens == plain.generated_tokens


def test_a_stopped_engine_raises_what_both_worlds_catch(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        future = engine.add_request(0, PROMPTS[0], greedy_params(2))
        engine.suspend()
        for kind in (megatron_engines.EngineSuspendedError, errors.EngineStopped):
            with pytest.raises(kind, match="resume"):
                engine.step_modern()
            with pytest.raises(kind):
                asyncio.run(engine.async_step())
            with pytest.raises(kind):
                engine.generate([PROMPTS[0]], greedy_params(2))
        engine.resume()
        drain(engine)
        assert future.result()[0].succeeded()


def test_an_abort_is_a_failed_record(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        future = engine.add_request(0, PROMPTS[0], greedy_params(50))
        other = engine.add_request(1, PROMPTS[1], greedy_params(5))
        for _ in range(4):
            engine.step_modern()
        engine.abort_request(0)
        request = future.result()[0]
        assert request.failed()
        assert 0 < len(request.generated_tokens) < 50
        assert "aborted" in str(request.events[-2].payload)
        ids = []
        while engine.has_unfinished_requests():
            ids += [r.request_id for r in engine.step_modern()["finished_request_records"]]
        assert ids == [0, 1]
        assert other.result()[0].succeeded()


def test_parts_of_our_own_trio_are_refused(tiny_model: torch.nn.Module) -> None:
    own = make_engine(tiny_model, max_requests=2)
    context = DynamicInferenceContext(tiny_model.config, compat_config())
    with pytest.raises(ConfigurationError, match=r"megatron_async.compat"):
        DynamicInferenceEngine(own.controller, context)  # type: ignore[arg-type]
    own.close()
    context.device.close()
