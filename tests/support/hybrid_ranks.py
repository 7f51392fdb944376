"""Hybrid models on ranks: called on every rank, which loads its part and serves the same jobs, or,
of ranks that share experts, jobs of its own."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.devices import Chaos, CpuDevice
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.pipeline import stage_of
from megatron_async.ranks.join_group import join_group
from tests.support.capturing_cpu import CapturingCpu
from tests.support.harness import (
    CPU,
    Job,
    assert_all_is_back,
    greedy,
    make_engine,
    make_model,
    random_prompts,
    run_at,
)
from tests.support.poison import poison_states

TINY = DUMMY_SHAPES["tiny-hybrid"]
MODELS = {
    "attention behind": TINY,
    "attention ahead": replace(TINY, pattern="*-*EMEM", num_layers=7),
    "both on both": replace(TINY, pattern="M*EM-M*E", num_layers=8),
    "one group": replace(TINY, mamba_num_groups=1),
    "gated delta": replace(DUMMY_SHAPES["tiny-gated-delta"], pattern="GEG-*EGE", num_layers=4),
}
"""With experts, and two groups of Mamba-2 heads but for one; the last has two key heads of Gated
DeltaNet."""
STAGES = {
    "attention behind": "MEM|*-E",
    "attention ahead": "*-*E|MEM",
    "both on both": "M*EM-|M*E",
    "gated delta": "GEG-|*EGE",
}
"""How two pipeline stages share the layers."""
TOKENS = 20
_SAMPLED: dict[str, Any] = {"num_tokens_to_generate": TOKENS, "termination_id": -1}
_PROMPTS = random_prompts(5, (3, 40, 290, 1, 26, 7, 130, 2), TINY.vocab_size)
_PROMPTS[6][:128] = _PROMPTS[2][:128]
JOBS = [
    Job(prompt, greedy(TOKENS) if n % 3 else SamplingParams(temperature=0.9, seed=n, **_SAMPLED))
    for n, prompt in enumerate(_PROMPTS)
]
"""The last but one begins like the longest."""
ARRIVALS = {0: JOBS[:2], 3: JOBS[2:3], 4: JOBS[3:6], 9: JOBS[6:]}
PLENTY: dict[str, Any] = {
    "block_size_tokens": 16, "max_requests": 8, "enable_prefix_caching": False,
}  # fmt: skip
SCARCE: dict[str, Any] = {
    "block_size_tokens": 8, "num_kv_blocks": 46, "max_requests": 6, "max_tokens": 150,
    "paused_buffer_size_gb": 1e-9, "enable_prefix_caching": False,
}  # fmt: skip
"""Chunked prefill up to where scans are cut, pauses and evictions."""
CASES: list[dict[str, Any]] = [
    {"lookahead": 0, **SCARCE},
    {"lookahead": 2, **SCARCE},
    {"lookahead": 2, "num_cuda_graphs": 2, "max_tokens": 20, **PLENTY},
    {"lookahead": 1, "num_cuda_graphs": 2, "num_state_snapshots": 3, "max_tokens": 150,
     "prefix_caching_mamba_interval": 128, **PLENTY, "enable_prefix_caching": True},
]  # fmt: skip
NUMBERS = ((0, 1, 2, 6), (7, 3, 4, 5))
"""Jobs of each rank that shares experts."""


class RankRun(NamedTuple):
    """What a rank's engine did."""

    tokens: list[list[int]]
    steps: int
    pauses: int
    evictions: int
    captured_steps: int
    prefix_cache_snapshot_hits: int


def load(folder: str, sizes: ParallelSizes | None = None) -> torch.nn.Module:
    """This rank's part of a stored model, in float32."""
    source = open_model(folder)
    model = build_model(source.architecture, torch.float32, CPU, sizes=sizes)
    source.load_weights(model)
    return model


def engine_for(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    """An engine with states of nobody full of NaN, on a slow device or one that captures steps."""
    captures = "num_cuda_graphs" in settings
    device = CapturingCpu() if captures else CpuDevice(Chaos(5, 0.1, 0.001))
    engine = make_engine(model, device=device, **settings)
    poison_states(engine)
    return engine


def alone(folder: str) -> list[list[int]]:
    """Tokens of the jobs on one rank, one after another, without a step ahead."""
    engine = engine_for(load(folder), lookahead=0, **PLENTY)
    found = [engine.generate([job.prompt], job.params)[0] for job in JOBS]
    engine.close()
    return [list(request.generated_tokens) for request in found]


def serve_all(
    folder: str, sizes: ParallelSizes, cases: tuple[int, ...]
) -> tuple[str, list[RankRun]]:
    """The layers of this rank's stage, and all jobs, by case."""
    model, runs = load(folder, sizes), []
    for settings in (CASES[number] for number in cases):
        engine = engine_for(model, **settings)
        tokens, stats = run_at(engine, ARRIVALS), engine.stats()
        engine.close()
        assert_all_is_back(engine)
        runs.append(_run(tokens, stats))
    return stage_of(model.config).pattern, runs


def serve_mine(folder: str, cases: tuple[int, ...]) -> list[RankRun]:
    """This rank's jobs, by case, with half of the experts."""
    model, runs = load(folder, ParallelSizes(expert_model_parallel=2)), []
    jobs = [JOBS[number] for number in NUMBERS[int(os.environ["RANK"])]]
    for settings in (CASES[number] for number in cases):
        engine = engine_for(model, **settings)
        engine.loop.join(join_group(check_agreement=False)[0])
        tokens = run_at(engine, {0: jobs[:2], 3: jobs[2:]})
        while engine.in_flight or engine.has_unfinished_requests():
            engine.step_modern()
        stats = engine.stats()
        engine.close()
        assert_all_is_back(engine)
        runs.append(_run(tokens, stats))
    return runs


def _run(tokens: list[list[int]], stats: dict[str, Any]) -> RankRun:
    return RankRun(tokens, *(stats[name] for name in RankRun._fields[1:]))


def pools(folder: str) -> list[int]:
    """KV blocks on a pipeline stage: of as much memory as there is by default, and of little of it
    on the stage with attention."""
    model, found = load(folder, ParallelSizes(pipeline_model_parallel=2)), []
    for free in (None, 600_000):
        device = CpuDevice()
        if free is not None and "*" in stage_of(model.config).pattern:
            device.free_memory = partial(int, free)  # type: ignore[method-assign]
        engine = make_engine(model, device=device, buffer_size_gb=None, **PLENTY)
        found.append(engine.context.blocks.total)
        engine.close()
    return found


Tokens = list[list[int]]


def store_lively(
    models: dict[str, ModelArchitecture], root: Path, answer: Callable[[str], Tokens]
) -> dict[str, tuple[str, Tokens]]:
    """Store models with random weights in folders of their own in `root`; by name the folder and
    what its model says. An AssertionError if that is few different tokens, which would hide wrong
    states."""
    found = {}
    for name, architecture in models.items():
        folder = root / name.replace(" ", "-")
        folder.mkdir()
        save_huggingface(make_model(architecture), architecture, None, folder)
        tokens = answer(str(folder))
        assert min(len(set(row)) for row in tokens) > 5, f"{name} is dull"
        found[name] = str(folder), tokens
    return found
