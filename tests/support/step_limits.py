"""`StepLimits`: limits for prompt tokens, as `target_tpot_ms` has them, but by step and not by a
clock: the same each time."""

from __future__ import annotations

from megatron_async import DynamicInferenceEngine
from megatron_async.contexts.step_plan import StepPlan
from megatron_async.engines.listener import EngineListener

LIMITS = (10**6, 10**6, 5, 1, 10**6, 9)
"""Prompt tokens that steps with decode rows may have, by turns."""


class StepLimits(EngineListener):
    """Sets the limit of each next step, once there was one.

    Args:
        engine: listened to.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._context = engine.context
        engine.listeners.append(self)

    def launched(self, plan: StepPlan | None) -> None:
        context = self._context
        context.scheduler.prefill_limit = LIMITS[context.next_step % len(LIMITS)]
