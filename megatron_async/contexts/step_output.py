"""`StepOutput`: what a resolved step yields, once its samples are in the books."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.contexts.step_plan import IntArray, StepPlan

_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class StepOutput:
    """What one resolved step yields: arrays over its live rows, and over their tokens.

    Splitting it by request, detokenizing and streaming are the consumer's work.
    """

    step: int
    slots: IntArray
    """int32 `[live]`."""
    request_ids: NDArray[np.int64]
    """int64 `[live]`."""
    tokens: IntArray
    """int32 `[tokens]`, those of a row in order, row by row."""
    rows: IntArray
    """int64 `[tokens]`: the live row that each token belongs to."""
    is_first: NDArray[np.bool_]
    """bool `[live]`: the row has its request's first generated token."""
    stopped: NDArray[np.bool_]
    """bool `[live]`: the row's last token ends its request (termination id or stop token)."""
    ended: NDArray[np.bool_]
    """bool `[live]`: stopped, or at its length limit."""
    failed_slots: IntArray
    """int32 `[failed]`: of requests whose logits left no token to choose."""
    zombie_rows: int
    """Rows whose request was gone when the step was resolved."""
    log_probs: IntArray | None = None
    """int32 `[tokens, OUT_WORDS]`, meaningful in rows that asked; None where no row of the step
    did."""

    @property
    def token_request_ids(self) -> NDArray[np.int64]:
        """Request of each token, int64 `[tokens]`."""
        return self.request_ids[self.rows]

    def tokens_of(self, row: int) -> IntArray:
        """Tokens of a live row, int32."""
        first, end = np.searchsorted(self.rows, (row, row + 1))
        return self.tokens[first:end]

    def without(self, dropped: NDArray[np.bool_]) -> StepOutput:
        """This output without some tokens, bool `[tokens]`."""
        kept = ~dropped
        log_probs = None if self.log_probs is None else self.log_probs[kept]
        return replace(self, tokens=self.tokens[kept], rows=self.rows[kept], log_probs=log_probs)


def book_samples(
    plan: StepPlan,
    slots: RequestSlots,
    sampled: IntArray,
    counts: IntArray,
    log_probs: IntArray | None,
) -> StepOutput:
    """Book the samples of a step, each row up to its first stop token.

    Args:
        plan: of the step.
        slots: the books.
        sampled, counts, log_probs: of `DynamicInferenceContext.update_requests`.
    """
    held = slots.generation[plan.slots] == plan.generations
    live = held & plan.produces
    owners = plan.slots[live]
    length = slots.num_known[owners]
    slots.count_back(owners, plan.widths[live] if slots.max_width > 1 else 1)
    tokens: IntArray = sampled[live, 0]
    failed: IntArray = _NO_ROWS
    rows: IntArray = np.arange(len(owners))
    has_token: NDArray[np.bool_] | bool = True
    if slots.max_width == 1 and tokens.min(initial=0) >= 0:
        stopped = (slots.stop_ids[owners] == tokens[:, None]).any(axis=1)
        slots.tokens[owners, length] = tokens
        end = length + 1
    else:
        counts, stopped, failed = _cut(sampled[live], counts[live], slots.stop_ids[owners])
        place = np.arange(sampled.shape[1])
        is_token = place < counts[:, None]
        tokens, rows = sampled[live][is_token], np.repeat(rows, counts)
        slots.tokens[owners[rows], length[rows] + np.nonzero(is_token)[1]] = tokens
        has_token, end = counts > 0, length + counts
    slots.num_known[owners] = end
    if log_probs is not None:
        each = np.arange(log_probs.shape[1]) < (end - length)[:, None]
        log_probs = log_probs[live][each]
    return StepOutput(
        step=plan.step,
        slots=owners,
        request_ids=slots.request_id[owners],
        tokens=tokens,
        rows=rows,
        is_first=(length == slots.prompt_length[owners]) & has_token,
        stopped=stopped,
        ended=stopped | (end >= slots.max_length[owners]),
        failed_slots=owners[failed],
        zombie_rows=len(held) - int(np.count_nonzero(held)),
        log_probs=log_probs,
    )


def _cut(
    table: IntArray, counts: IntArray, stop_ids: IntArray
) -> tuple[IntArray, NDArray[np.bool_], IntArray]:
    """How many of its tokens each row keeps: up to the first stop token, and none from a -1 on.

    Args:
        table: int32 `[rows, most tokens]`.
        counts: int32 `[rows]`, tokens that the device gave.
        stop_ids: int32 `[rows, ids]`, padded with -1.

    Returns:
        int32 `[rows]`; whether the last one is a stop token, bool `[rows]`; rows with a -1, int64.
    """
    column = np.arange(table.shape[1])
    is_stop = (stop_ids[:, None] == table[:, :, None]).any(axis=2)
    is_stop &= (column < counts[:, None]) & (table >= 0)
    stopped = is_stop.any(axis=1)
    counts = np.where(stopped, is_stop.argmax(axis=1) + 1, counts)
    is_missing = (column < counts[:, None]) & (table < 0)
    failed = np.flatnonzero(is_missing.any(axis=1))
    counts[failed] = is_missing[failed].argmax(axis=1)
    return counts, stopped, failed
