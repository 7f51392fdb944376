"""`StepOutput`: what a resolved step yields, once its samples are in the books."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.contexts.step_plan import IntArray, StepPlan


@dataclass(frozen=True)
class StepOutput:
    """What one resolved step yields: arrays over its live rows.

    Splitting it by request, detokenizing and streaming are the consumer's work.
    """

    step: int
    slots: IntArray
    """int32 `[live]`."""
    request_ids: NDArray[np.int64]
    """int64 `[live]`."""
    tokens: IntArray
    """int32 `[live]`."""
    is_first: NDArray[np.bool_]
    """bool `[live]`: the request's first generated token."""
    stopped: NDArray[np.bool_]
    """bool `[live]`: the token ends its request (termination id or stop token)."""
    ended: NDArray[np.bool_]
    """bool `[live]`: stopped, or at its length limit."""
    failed_slots: IntArray
    """int32 `[failed]`: of requests whose logits left no token to choose."""
    zombie_rows: int
    """Rows whose request was gone when the step was resolved."""
    log_probs: IntArray | None = None
    """int32 `[live, OUT_WORDS]`, meaningful in rows that asked; None where no row of the step
    did."""


def book_samples(
    plan: StepPlan, slots: RequestSlots, sampled: IntArray, log_probs: IntArray | None
) -> StepOutput:
    """Book the samples of a step; see `DynamicInferenceContext.update_requests`."""
    held = slots.generation[plan.slots] == plan.generations
    live = held & plan.produces
    failed_slots = plan.slots[live & (sampled < 0)]
    live &= sampled >= 0
    rows, tokens = plan.slots[live], sampled[live]
    length = slots.num_known[rows]
    slots.tokens[rows, length] = tokens
    slots.num_known[rows] = length + 1
    stopped = (slots.stop_ids[rows] == tokens[:, None]).any(axis=1)
    return StepOutput(
        step=plan.step,
        slots=rows,
        request_ids=slots.request_id[rows],
        tokens=tokens,
        is_first=length == slots.prompt_length[rows],
        stopped=stopped,
        ended=stopped | (length + 1 >= slots.max_length[rows]),
        failed_slots=failed_slots,
        zombie_rows=len(held) - int(np.count_nonzero(held)),
        log_probs=None if log_probs is None else log_probs[live],
    )
