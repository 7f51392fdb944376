"""`ModelShape` makes the plans that the model's own configuration makes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import SamplingParams
from megatron_async.config import InferenceConfig
from megatron_async.device_state.device_memory import block_shape
from megatron_async.device_state.recurrent_state import RecurrentState
from megatron_async.engine.listener import EngineListener
from megatron_async.lab.model_less import ModelLessEngine
from megatron_async.lab.model_shape import FIELDS, ModelShape
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.model_config import ModelConfig, transformer_config
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.planning.step_plan import IntArray, StepPlan

HYBRID = DUMMY_SHAPES["tiny-hybrid"]
RECURRENT = replace(HYBRID, pattern="M-M-M-", num_moe_experts=0)
MAMBA_LAYER = 8 * 16 * 32 + 17 * (8 * 16 + 2 * 32) + 17 * 2 * 8 + 4 * (8 * 16 + 2 * 2 * 32)
"""8 heads of 16, state 32, two groups; a ring of 17 inputs, and of 4."""
DELTA_LAYER = 4 * 16 * 16 + 17 * (4 * 16 + 2 * 16) + 17 * 4 + 4 * (4 * 16 + 2 * 2 * 16)
"""2 key heads and 4 value heads of 16; a ring of 17 pseudo values and keys, and of 4 inputs."""
DELTA = DUMMY_SHAPES["tiny-gated-delta"]
MIXED = replace(
    DELTA, pattern="MGE*-M", num_layers=6,
    **{name: getattr(HYBRID, name) for name in FIELDS["M"]},
)  # fmt: skip
SETTINGS: dict[str, Any] = {"block_size_tokens": 16, "max_tokens": 150, "max_requests": 4}


class Ones:
    def sample(self, plan: StepPlan, context: Any) -> tuple[IntArray, IntArray]:
        return np.ones(plan.num_rows, np.int32), np.ones(plan.num_rows, np.int32)


class Chunks(EngineListener):
    """Prompt tokens of each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def launched(self, plan: StepPlan | None) -> None:
        if plan is not None and len(plan.prefill_token_ids):
            self.seen.append(len(plan.prefill_token_ids))


def stages(architecture: ModelArchitecture, tensor: int, pipeline: int) -> list[ModelConfig]:
    """Configurations of a model on the stages of a pipeline."""
    sizes = ParallelSizes(tensor_model_parallel=tensor, pipeline_model_parallel=pipeline)
    found = [transformer_config(architecture, torch.float32, sizes) for _ in range(pipeline)]
    for number, config in enumerate(found):
        config.pipeline_stage = number
    return found


@pytest.mark.parametrize(
    ("pattern", "chunks"),
    [("MEM*-E", [128, 128, 44]), ("GE*E", [128, 128, 44]), ("*-", [150, 150])],
)
def test_prompts_are_cut_where_scans_are(pattern: str, chunks: list[int]) -> None:
    shape = ModelShape.of_architecture(
        replace(MIXED, pattern=pattern, num_layers=len(pattern)), "bfloat16"
    )
    engine = ModelLessEngine(shape, InferenceConfig(num_kv_blocks=64, **SETTINGS), Ones())
    engine.listeners.append(listener := Chunks())
    engine.generate([[1] * 300], SamplingParams(num_tokens_to_generate=3))
    assert listener.seen == chunks
    engine.close()


def test_a_model_without_attention_needs_no_pool() -> None:
    shape = ModelShape.of_architecture(RECURRENT, "bfloat16")
    config = InferenceConfig(max_sequence_length=320, **SETTINGS)
    engine = ModelLessEngine(shape, config, Ones())
    assert engine.context.blocks.total == 4 * 20, "of four requests that are as long as can be"
    requests = engine.generate([[1] * 300] * 6, SamplingParams(num_tokens_to_generate=20))
    assert all(len(request.generated_tokens) == 20 for request in requests)
    assert engine.stats()["pauses"] == 0
    engine.close()


@pytest.mark.parametrize(
    ("architecture", "elements"),
    [
        (HYBRID, 2 * MAMBA_LAYER),
        (DELTA, 2 * DELTA_LAYER),
        (MIXED, 2 * MAMBA_LAYER + DELTA_LAYER),
    ],
)
def test_states_are_the_models(architecture: ModelArchitecture, elements: int) -> None:
    shape = ModelShape.of_architecture(architecture, "float32")
    engine = ModelLessEngine(shape, InferenceConfig(num_kv_blocks=64, **SETTINGS), Ones())
    state = engine.context.gpu_view.states.find(RecurrentState)
    assert state is not None
    assert state.bytes_per_slot == 4 * elements
    engine.close()


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny", "nemotron-h-8b", "tiny-gated-delta"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_have_blocks_as_large_as_the_largest(name: str, tensor: int, pipeline: int) -> None:
    """By it is reckoned how many of them paused requests may hold."""
    config = InferenceConfig(**SETTINGS)
    ranks = stages(DUMMY_SHAPES[name], tensor, pipeline)
    largest = max(block_shape(rank, config).num_bytes for rank in ranks)
    for rank in ranks:
        context: Any = SimpleNamespace(model_config=rank)
        shape = ModelShape.of_context(context, 512)
        assert block_shape(shape, config).num_bytes == largest
        assert shape.num_mamba_layers == DUMMY_SHAPES[name].count("M")
        assert shape.num_delta_layers == DUMMY_SHAPES[name].count("G")
        assert ModelShape(**shape.to_dict()) == shape
