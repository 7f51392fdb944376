"""`PacedEngine`: the engine before a device that computes nothing and takes its time, really: a GPU
of a given speed, as far as the host can tell."""

from __future__ import annotations

import numpy as np

from megatron_async import InferenceConfig
from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.simulation.model_less import ModelLessEngine
from megatron_async.simulation.model_shape import ModelShape
from megatron_async.simulation.virtual_device import RealClock, VirtualDevice

BLOCK_SIZE = 256
MAX_TOKENS = 2048


class _SlowTokens:
    """Every row's sample, after a time on the device."""

    def __init__(self, step_s: float) -> None:
        self._step_us = 1e6 * step_s

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        """Sevens."""
        assert isinstance(context.device, VirtualDevice)
        context.device.compute.spend(self._step_us)
        return np.full(plan.num_rows, 7, np.int32), np.ones(plan.num_rows, np.int32)


class PacedEngine(ModelLessEngine):
    """Each step takes the device `step_s`.

    Args:
        step_s: seconds.
        rows: most requests of a step.
        length: most tokens of a sequence.
        late_launch: see `InferenceConfig.late_launch`.
    """

    def __init__(self, step_s: float, rows: int, length: int, late_launch: bool = False) -> None:
        shape = ModelShape.of_architecture(DUMMY_SHAPES["tiny"], "float32")
        config = InferenceConfig(
            max_requests=rows, max_tokens=MAX_TOKENS, max_sequence_length=length,
            num_kv_blocks=rows * -(-length // BLOCK_SIZE), block_size_tokens=BLOCK_SIZE,
            enable_prefix_caching=False, lookahead=1, late_launch=late_launch,
        )  # fmt: skip
        super().__init__(shape, config, _SlowTokens(step_s), clock=RealClock())
