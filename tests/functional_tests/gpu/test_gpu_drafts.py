"""Drafts on a GPU cannot be seen in the output, and steps that draft wait for nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.devices import CpuDevice, CudaDevice
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from tests.support.draft_watches import DraftRecorder
from tests.support.harness import (
    Job,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
    run_at,
)
from tests.support.poison import poison_states

pytestmark = pytest.mark.gpu
SHAPES = {
    "attention": replace(DUMMY_SHAPES["tiny"], kv_channels=32),
    "Mamba-2": replace(
        DUMMY_SHAPES["tiny-hybrid"], kv_channels=32, mamba_head_dim=32, mamba_state_dim=64
    ),
    "Gated DeltaNet": replace(
        DUMMY_SHAPES["tiny-gated-delta"],
        kv_channels=32,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
    ),
}
ROOM = {"num_kv_blocks": 160, "max_requests": 12, "block_size_tokens": 16}
FEW = dict.fromkeys((3, 11, 40), 50.0)
"""A bias that leaves three tokens: such a text repeats itself, but not always."""
TOKENS = 64


def jobs(vocabulary: int) -> list[Job]:
    """Half of them repeat themselves; half of those are drawn."""
    prompts = random_prompts(0, (1, 5, 33, 64, 17, 100, 2, 48, 300, 128), vocabulary)
    return [
        Job(prompt, greedy(TOKENS, seed=number, temperature=0.7 * (number % 4 == 1),
                           logit_bias=FEW if number % 2 else None))
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> ModelArchitecture:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def cpu_tokens(shape: ModelArchitecture) -> list[list[int]]:
    engine = make_engine(make_model(shape), lookahead=0, max_tokens=512, **ROOM)
    tokens = run_at(engine, {0: jobs(shape.vocab_size)})
    engine.close()
    return tokens


@pytest.fixture(scope="module")
def gpu_model(shape: ModelArchitecture) -> torch.nn.Module:
    torch.backends.cuda.matmul.allow_tf32 = False
    return make_model(shape, torch.device("cuda"))


CASES: dict[str, dict[str, Any]] = {
    "eager": {"lookahead": 0, "num_cuda_graphs": 0, "num_speculative_tokens": 3},
    "one draft": {"lookahead": 1, "num_speculative_tokens": 1},
    "three drafts": {"lookahead": 1, "num_speculative_tokens": 3},
    "two ahead": {"lookahead": 2, "num_speculative_tokens": 4, "max_tokens": 96},
    "evictions": {
        "lookahead": 1,
        "num_speculative_tokens": 2,
        "num_kv_blocks": 28,
        "paused_buffer_size_gb": 1e-9,
    },
    "shared": {"lookahead": 1, "num_speculative_tokens": 3, "enable_prefix_caching": True},
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_the_cpus(shape, gpu_model, cpu_tokens, name: str):
    """Break it: `_unpack_kernel` without `brought`, and tokens differ."""
    settings = {**ROOM, **CASES[name], "speculative_method": "ngram"}
    engine = make_engine(gpu_model, device=CudaDevice(), **settings)
    poison_states(engine)
    todo = jobs(shape.vocab_size)
    found = run_at(engine, {0: todo[:5], 4: todo[5:]})
    if name == "shared":
        assert run_at(engine, {0: todo}, first_id=len(todo)) == cpu_tokens
    stats = engine.stats()
    assert_all_is_back(engine)
    engine.close()
    assert found == cpu_tokens
    assert 40 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert (stats["captured_steps"] > stats["steps"] / 2) == (name != "eager")
    assert stats["evictions"] > 0 or name != "evictions"


MTP_SHAPES = {
    name: replace(
        shape,
        mtp_pattern="*E" if shape.num_moe_experts else "*-",
        mtp_num_depths=2 if name == "attention" else 1,
    )
    for name, shape in SHAPES.items()
}
MTP_CASES: dict[str, dict[str, Any]] = {
    "eager": {"lookahead": 0, "num_cuda_graphs": 0, "num_speculative_tokens": 2},
    "captured": {"lookahead": 1, "num_speculative_tokens": 1},
    "three drafts": {"lookahead": 2, "num_speculative_tokens": 3, "max_tokens": 96},
    "evictions": {
        "lookahead": 1,
        "num_speculative_tokens": 2,
        "num_kv_blocks": 28,
        "paused_buffer_size_gb": 1e-9,
    },
    "shared": {"lookahead": 1, "num_speculative_tokens": 3, "enable_prefix_caching": True},
}


def mtp_engine(model: torch.nn.Module, device: Any, **settings: Any) -> DynamicInferenceEngine:
    return make_engine(model, device=device, speculative_method="mtp", **{**ROOM, **settings})


@pytest.fixture(scope="module", params=MTP_SHAPES)
def mtp_models(request: pytest.FixtureRequest) -> tuple[Any, Any, dict[tuple[int, ...], list[int]]]:
    """On the CPU and on the GPU; what the former drafts, three tokens each."""
    shape = MTP_SHAPES[request.param]
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu = make_model(shape, with_mtp=True)
    engine = mtp_engine(on_cpu, CpuDevice(), lookahead=0, num_speculative_tokens=3)
    recorder = DraftRecorder(engine)
    run_at(engine, {0: jobs(shape.vocab_size)})
    engine.close()
    return shape, make_model(shape, torch.device("cuda"), with_mtp=True), recorder.drafts


@pytest.mark.parametrize("name", MTP_CASES)
def test_an_mtp_layer_drafts_what_it_drafts_on_the_cpu(mtp_models: Any, name: str) -> None:
    """Whatever the schedule: a stale hidden state or a lost entry would show here."""
    shape, model, wanted = mtp_models
    engine = mtp_engine(model, CudaDevice(), **MTP_CASES[name])
    poison_states(engine)
    recorder, todo = DraftRecorder(engine), jobs(shape.vocab_size)
    found = run_at(engine, {0: todo[:5], 4: todo[5:]})
    if name == "shared":
        assert run_at(engine, {0: todo}, first_id=len(todo)) == found
    stats = engine.stats()
    assert_all_is_back(engine)
    engine.close()
    both = recorder.drafts.keys() & wanted.keys()
    assert len(both) > 0.9 * len(recorder.drafts)
    for tokens in both:
        drafts = recorder.drafts[tokens]
        assert drafts == wanted[tokens][: len(drafts)], (len(tokens), drafts, wanted[tokens])
    assert (stats["captured_steps"] > stats["steps"] / 2) == (name != "eager")
    assert stats["evictions"] > 0 or name != "evictions"
    assert stats["prefix_cache_hits"] > 0 or name != "shared"


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_steps_wait_for_nothing(shape: ModelArchitecture, gpu_model: torch.nn.Module, method: str):
    model = gpu_model
    if method == "mtp":
        mtp_pattern = "*E" if shape.num_moe_experts else "*-"
        shape = replace(shape, mtp_pattern=mtp_pattern, mtp_num_depths=1)
        model = make_model(shape, torch.device("cuda"), with_mtp=True)
    engine = make_engine(
        model, device=CudaDevice(), lookahead=1, speculative_method=method,
        num_speculative_tokens=3, **ROOM,
    )  # fmt: skip
    for number, job in enumerate(jobs(shape.vocab_size)):
        params = replace(job.params, num_tokens_to_generate=140)
        engine.add_request(number, job.prompt, params)
    for _ in range(12):
        engine.step_modern()
    before = engine.stats()["accepted_tokens"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step_modern()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.stats()["accepted_tokens"] > before or method == "mtp"  # of random weights
    drain(engine)
