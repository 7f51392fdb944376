"""Tokens that requests found in the cache when they got their slots, read off a plan."""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.ops.sampling.slot_records import RowFeature


def cached_tokens(plan: StepPlan) -> IntArray:
    """How many tokens each prefill chunk's request found in the cache, integers `[chunks]`; 0 for a
    chunk that is not the first one since its request got its slot."""
    ends = plan.kv_at_most[plan.num_decode :]
    begins = ends - np.diff(plan.prefill_starts)
    is_first = (plan.prefill_features & RowFeature.STARTS) != 0
    return np.where(is_first, begins, 0)
