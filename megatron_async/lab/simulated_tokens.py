"""What the steps of a simulation sample, and which tokens requests found in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.step_plan import IntArray, StepPlan


def cached_tokens(plan: StepPlan) -> IntArray:
    """How many tokens each prefill chunk's request found in the cache, integers `[chunks]`; 0 for a
    chunk that is not the first one since its request got its slot."""
    ends = plan.kv_at_most[plan.num_decode :]
    begins = ends - np.diff(plan.prefill_starts)
    is_first = (plan.prefill_features & RowFeature.STARTS) != 0
    return np.where(is_first, begins, 0)


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
        """Zeros; and note the requests that are prefilled for the first time."""
        now = context.device.clock.now_us  # type: ignore[attr-defined]  # a VirtualDevice
        begun = context.slots.request_id[plan.slots[plan.num_decode :]]
        for request_id, cached in zip(begun, cached_tokens(plan), strict=True):
            if int(request_id) not in self.first_launched:
                self.first_launched[int(request_id)] = now
                self.cached_tokens += int(cached)
        ones = np.ones(plan.num_rows, dtype=np.int32)
        return np.zeros(plan.num_rows, dtype=np.int32), ones


RIGHT, WRONG = 0, 1
"""Drafts. Every token of the simulation is 0."""


class ForcedDrafts(AnyToken):
    """Every row drafts behind every step; the device's part of the books (lengths, the drafts that
    the next step verifies) is kept here, by slot."""

    def __init__(self, chances: Sequence[float], slots: int, seed: int = 0) -> None:
        super().__init__()
        self._chances = np.array(chances)
        self._random = np.random.default_rng(seed)
        self._length = np.zeros(slots, dtype=np.int64)
        self._right = np.zeros(slots, dtype=np.int64)
        """How many of a slot's drafts are right, up to the first that is not."""

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        """Zeros for each row: one more than it has right drafts, within the request's limit."""
        super().sample(plan, context)
        slots, decode = plan.slots, plan.num_decode
        counts = np.ones(plan.num_rows, dtype=np.int32)
        decoding = slots[:decode]
        right = np.minimum(self._right[decoding], plan.widths[:decode] - 1)
        room = context.slots.max_length[decoding] - self._length[decoding]
        counts[:decode] = np.clip(1 + right, 0, np.maximum(room, 0))
        self._length[decoding] += counts[:decode]
        # A chunk's KV length is exact; behind its prompt there is one token.
        self._length[slots[decode:]] = plan.kv_at_most[decode:] + 1
        return np.zeros(int(counts.sum()), dtype=np.int32), counts

    def drafts(self, plan: StepPlan) -> IntArray:
        """Drafts of the plan's rows for the next step, int32 `[rows, drafts]`."""
        is_right = self._random.random((plan.num_rows, len(self._chances))) < self._chances
        right = np.logical_and.accumulate(is_right, axis=1)
        self._right[plan.slots] = right.sum(axis=1)
        return np.where(right, RIGHT, WRONG).astype(np.int32)
