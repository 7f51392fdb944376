"""Every feature of a request on a GPU, in captured steps: the CPU's answers in float32, no hidden
waits, and nothing extra in steps that do not ask."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from megatron_async.devices import CudaDevice
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from tests.functional_tests.grammar.test_structured_output import (
    CHOICE,
    JOBS,
    ascii_tokenizer,
    check_valid,
)
from tests.support.harness import Job, drain, greedy, make_engine, make_model, random_prompts

__all__ = ["ascii_tokenizer"]
pytestmark = pytest.mark.gpu
# A token for each letter, as structured output's tests have it, and heads that the kernels serve.
SHAPE = ModelArchitecture("llama", 2, 128, 4, 2, 32, 256, 128, max_position_embeddings=1024)
TOKENS = 40
PRESSURE = {"num_kv_blocks": 24, "block_size_tokens": 8, "max_tokens": 64}
EngineFactory = Callable[..., DynamicInferenceEngine]


def feature_jobs() -> list[Job]:
    """Each feature alone, all together, and a plain request among them."""
    asks = {"return_log_probs": True, "top_n_logprobs": 5}
    penalties = {
        "frequency_penalty": 0.7, "presence_penalty": -0.3, "repetition_penalty": 1.2
    }  # fmt: skip
    edits = {
        "logit_bias": {5: 3.0, 9: -20.0},
        "min_tokens": 12,
        "stop_token_ids": [*range(0, 128, 5)],
    }
    words = {"bad_words": [[7], [118, 127], [3, 4, 5]]}
    changes: list[dict[str, Any]] = [
        asks, penalties, edits, words, {**asks, **penalties, **edits, **words}, {},
        {**asks, "skip_prompt_log_probs": True, "logprobs_mode": "processed", **penalties},
        {**asks, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "logprobs_mode": "processed"},
    ]  # fmt: skip
    prompts = random_prompts(1, (3, 40, 17, 5, 25, 12, 33, 1), SHAPE.vocab_size)
    return [
        Job(prompt, greedy(TOKENS, seed=number, **change))
        for number, (prompt, change) in enumerate(zip(prompts, changes, strict=True))
    ]


@pytest.fixture(scope="module")
def gpu_model() -> torch.nn.Module:
    return make_model(SHAPE, torch.device("cuda"))


@pytest.fixture
def make_gpu_engine(gpu_model: torch.nn.Module) -> EngineFactory:
    def make(**config: Any) -> DynamicInferenceEngine:
        settings = {"num_kv_blocks": 128, "max_requests": 8, "max_tokens": 64, **config}
        return make_engine(gpu_model, device=CudaDevice(), **settings)

    return make


def serve(engine: DynamicInferenceEngine, jobs: list[Job]) -> list[DynamicInferenceRequest]:
    futures = []
    for number, job in enumerate(jobs):
        futures.append(engine.add_request(number, job.prompt, job.params))
        if number % 3 == 2:
            engine.step_modern()
    drain(engine)
    return [future.result() for future in futures]


@pytest.fixture(scope="module")
def cpu_answers() -> Iterator[list[DynamicInferenceRequest]]:
    engine = make_engine(make_model(SHAPE), lookahead=0, num_kv_blocks=128, max_requests=8)
    yield serve(engine, feature_jobs())
    engine.close()


def check_same(found: DynamicInferenceRequest, expected: DynamicInferenceRequest) -> None:
    assert found.error is None
    assert found.generated_tokens == expected.generated_tokens
    for name in ("generated_log_probs", "prompt_log_probs"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert np.allclose(ours, theirs, rtol=0, atol=1e-3)
    if expected.log_probs is None:
        return
    for name in ("generated_top_n", "prompt_top_n"):
        ours, theirs = getattr(found.log_probs, name)(), getattr(expected.log_probs, name)()
        assert (ours is None) == (theirs is None)
        for place, other in zip(ours or (), theirs or (), strict=True):
            assert np.allclose([v for _, v in place], [v for _, v in other], rtol=0, atol=1e-3)
            assert [t for t, _ in place] == [t for t, _ in other]


@pytest.mark.parametrize("memory", [{}, PRESSURE], ids=["room", "pressure"])
def test_answers_equal_the_cpus(make_gpu_engine, cpu_answers, lookahead, memory: dict[str, int]):
    engine = make_gpu_engine(lookahead=lookahead, **memory)
    for found, expected in zip(serve(engine, feature_jobs()), cpu_answers, strict=True):
        check_same(found, expected)
    stats = engine.stats()
    assert stats["captured_steps"] >= 0.8 * stats["steps"]
    assert bool(stats["evictions"]) == bool(memory)


def sharing_jobs() -> list[Job]:
    """What `feature_jobs` ask for, behind prompts that begin alike."""
    (text,) = random_prompts(9, (70,), SHAPE.vocab_size)
    return [Job([*text, number], job.params) for number, job in enumerate(feature_jobs())]


@pytest.fixture(scope="module")
def cpu_sharing_answers() -> Iterator[list[DynamicInferenceRequest]]:
    engine = make_engine(make_model(SHAPE), lookahead=0, num_kv_blocks=128, max_requests=8)
    yield serve(engine, sharing_jobs())
    engine.close()


@pytest.mark.parametrize("evicts", [False, True])
def test_tokens_before_the_first_chunk_count(
    make_gpu_engine: EngineFactory,
    cpu_sharing_answers: list[DynamicInferenceRequest],
    lookahead: int,
    evicts: bool,
) -> None:
    """First chunks begin behind blocks of others, in slots that others have left; evicted requests
    begin behind their own generated tokens."""
    engine = make_gpu_engine(
        lookahead=lookahead, enable_prefix_caching=True, block_size_tokens=16, max_requests=4
    )
    serve(engine, feature_jobs()[:4])
    evicted = check_sharing(engine, cpu_sharing_answers, evicts)
    assert engine.stats()["captured_steps"] >= 0.5 * engine.stats()["steps"]
    assert engine.stats()["prefix_cache_hits"] >= 16 * (20 + 2 * evicted)
    assert (evicted > 8) == evicts


def check_sharing(
    engine: DynamicInferenceEngine, answers: list[DynamicInferenceRequest], evicts: bool
) -> int:
    """Serve `sharing_jobs`, one of which arrives with every step, and compare; the number of
    evictions."""
    jobs, futures, evicted = sharing_jobs(), [], 0
    for step in range(2000):
        if len(futures) == len(jobs) and not engine.has_unfinished_requests():
            break
        if len(futures) < len(jobs):
            job = jobs[len(futures)]
            futures.append(engine.add_request(100 + len(futures), job.prompt, job.params))
        engine.step_modern()
        if evicts and step % 9 == 8:
            evicted += engine.context.max_requests - engine.context.slots.num_free
            engine.context.scheduler.evict_all()
    for future, expected in zip(futures, answers, strict=True):
        check_same(future.result(), expected)
    return evicted


@pytest.mark.parametrize("graphs", [None, 0], ids=["captured", "eager"])
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_prompts_of_whole_blocks(name: str, graphs: int | None) -> None:
    """The last token alone is computed again, by several requests in one step; experts meet it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = replace(DUMMY_SHAPES[name], kv_channels=32)
    prompts = random_prompts(3, (16, 48, 128), shape.vocab_size)
    jobs = [Job(prompt, greedy(12, return_log_probs=True, skip_prompt_log_probs=True))
            for prompt in prompts]  # fmt: skip
    cold = make_engine(make_model(shape), lookahead=0, enable_prefix_caching=False)
    answers = serve(cold, jobs)
    cold.close()
    engine = make_engine(
        make_model(shape, torch.device("cuda")), device=CudaDevice(), lookahead=1,
        block_size_tokens=16, enable_prefix_caching=True, num_cuda_graphs=graphs,
    )  # fmt: skip
    for found in serve(engine, jobs):
        assert found.num_cached_tokens == 0
    warm = serve(engine, [*jobs, *jobs])
    captured = engine.stats()["captured_steps"]
    engine.close()
    for found, expected in zip(warm, [*answers, *answers], strict=True):
        check_same(found, expected)
        assert found.num_cached_tokens == len(found.prompt_tokens) - 1
    assert (captured > 0) == (graphs is None)


def test_structured_output(make_gpu_engine, ascii_tokenizer: Any, lookahead):
    plain = make_engine(
        make_model(SHAPE), lookahead=0, num_kv_blocks=128, max_requests=8, tokenizer=ascii_tokenizer
    )
    expected = serve(plain, JOBS)
    plain.close()
    engine = make_gpu_engine(lookahead=lookahead, tokenizer=ascii_tokenizer)
    for found, other in zip(serve(engine, JOBS), expected, strict=True):
        check_same(found, other)
        output = found.sampling_params.structured_output
        if output is not None:
            check_valid(found.generated_text, found.finish_reason, output)
    assert CHOICE
    # The step which computes a prompt's log probs is captured too.
    assert engine.stats()["captured_steps"] == engine.stats()["steps"]


def test_no_step_waits_in_secret(make_gpu_engine: EngineFactory, ascii_tokenizer: Any) -> None:
    engine = make_gpu_engine(lookahead=1, tokenizer=ascii_tokenizer)
    work = [job for job in [*feature_jobs()[:5], *JOBS[:3]] if job.params.temperature == 0]
    first = serve(engine, work)  # warm-up: memory is taken at first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = serve(engine, work)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.stats()["failed_steps"] == 0
    for found, expected in zip(second, first, strict=True):
        check_same(found, expected)


def kernels_and_copies(engine: DynamicInferenceEngine, params: SamplingParams) -> Counter[str]:
    """Counts of one decode step."""
    for number, prompt in enumerate(random_prompts(4, (5, 9, 14, 20), SHAPE.vocab_size)):
        engine.add_request(number, prompt, params)
    for _ in range(6):
        engine.step_modern()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    steps = 5
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            engine.step_modern()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type != torch.profiler.DeviceType.CUDA:
            continue
        kind = next((kind for kind in ("HtoD", "DtoH") if kind in event.name), "kernels")
        found[kind] += 1
    for number in range(4):
        engine.abort_request(number)
    drain(engine)
    return Counter({kind: count // steps for kind, count in found.items()})


def test_requests_that_did_not_ask_cost_nothing(make_gpu_engine: EngineFactory) -> None:
    engine = make_gpu_engine(lookahead=1)
    plain = kernels_and_copies(engine, greedy(100))
    asking = kernels_and_copies(engine, greedy(100, return_log_probs=True, min_tokens=3))
    assert kernels_and_copies(engine, greedy(100)) == plain
    # Copies of less than every step, for new blocks, count as none.
    assert plain["HtoD"] == plain["DtoH"] == asking["HtoD"] == 0
    assert asking["DtoH"] == 2
    assert asking["kernels"] > plain["kernels"]
