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
        """The same but for some tokens, bool `[tokens]`."""
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
    slots.count_back(owners, plan.widths[live])
    table, counts = sampled[live], counts[live]
    length = slots.num_known[owners]
    failed = _NO_ROWS
    if table.shape[1] == 1 and counts.all() and table.min(initial=0) >= 0:
        tokens, rows, place = table[:, 0], np.arange(len(owners)), length
        stopped = (slots.stop_ids[owners] == table).any(axis=1)
    else:
        column = np.arange(table.shape[1])
        is_stop = (slots.stop_ids[owners][:, None] == table[:, :, None]).any(axis=2)
        is_stop &= (column < counts[:, None]) & (table >= 0)
        stopped = is_stop.any(axis=1)
        counts = np.where(stopped, is_stop.argmax(axis=1) + 1, counts)
        is_missing = (column < counts[:, None]) & (table < 0)
        failed = np.flatnonzero(is_missing.any(axis=1))
        counts[failed] = is_missing[failed].argmax(axis=1)
        is_token = column < counts[:, None]
        tokens, rows = table[is_token], np.repeat(np.arange(len(owners)), counts)
        place = length[rows] + np.nonzero(is_token)[1]
    slots.tokens[owners[rows], place] = tokens
    slots.num_known[owners] = length + counts
    if log_probs is not None:
        log_probs = log_probs[live]
        log_probs = log_probs[np.arange(log_probs.shape[1]) < counts[:, None]]
    return StepOutput(
        step=plan.step,
        slots=owners,
        request_ids=slots.request_id[owners],
        tokens=tokens,
        rows=rows,
        is_first=(length == slots.prompt_length[owners]) & (counts > 0),
        stopped=stopped,
        ended=stopped | (length + counts >= slots.max_length[owners]),
        failed_slots=owners[failed],
        zombie_rows=len(held) - int(np.count_nonzero(held)),
        log_probs=log_probs,
    )
