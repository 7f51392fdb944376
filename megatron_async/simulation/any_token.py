"""`AnyToken`: what the steps of a simulation sample."""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.simulation.cached_tokens import cached_tokens


class AnyToken:
    """Requests end by their lengths, so it is all the same which tokens they get.

    Attributes:
        first_launched: request id -> time at which the step with its first chunk was launched,
            microseconds.
        cached_tokens: prompt tokens that requests found in the cache when they were prefilled for
            the first time.
    """

    def __init__(self) -> None:
        self.first_launched: dict[int, float] = {}
        self.cached_tokens = 0

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        """Zeros; and note who is prefilled for the first time."""
        now = context.device.clock.now_us  # type: ignore[attr-defined]  # a VirtualDevice
        begun = context.slots.request_id[plan.slots[plan.num_decode :]]
        for request_id, cached in zip(begun, cached_tokens(plan), strict=True):
            if int(request_id) not in self.first_launched:
                self.first_launched[int(request_id)] = now
                self.cached_tokens += int(cached)
        ones = np.ones(plan.num_rows, dtype=np.int32)
        return np.zeros(plan.num_rows, dtype=np.int32), ones
