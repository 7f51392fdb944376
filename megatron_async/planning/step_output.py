"""`StepOutput`: the tokens of a resolved step and the requests that end, once booked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_async.observe.verified_drafts import Verified
from megatron_async.planning.request_slots import NO_SLOTS, RequestSlots
from megatron_async.planning.step_plan import IntArray, StepPlan


@dataclass(frozen=True)
class StepOutput:
    """Result of one resolved step: arrays over its live rows, and over their tokens.

    Splitting it by request, detokenizing and streaming are the consumer's work.
    """

    step: int
    slots: IntArray
    """int64 `[live]`."""
    request_ids: NDArray[np.int64]
    """int64 `[live]`."""
    tokens: IntArray
    """int32 `[tokens]`, row by row, each row's in order."""
    rows: IntArray
    """int64 `[tokens]`: the live row that each token belongs to."""
    is_first: NDArray[np.bool_]
    """bool `[live]`: the row has its request's first generated token."""
    stopped: NDArray[np.bool_]
    """bool `[live]`: the row's last token ends its request (termination id or stop token)."""
    ended: NDArray[np.bool_]
    """bool `[live]`: stopped, or at its length limit."""
    failed_slots: IntArray
    """int64 `[failed]`: of requests whose logits left no token to choose."""
    zombie_rows: int
    """Rows whose request was gone when the step was resolved."""
    log_probs: IntArray | None = None
    """int32 `[tokens, OUT_WORDS]`, meaningful in rows that asked; None where no row of the step
    did."""
    verified: Verified | None = None
    """Counts of verified and accepted drafts; None without speculation."""

    @property
    def token_request_ids(self) -> NDArray[np.int64]:
        """Request of each token, int64 `[tokens]`."""
        return self.request_ids[self.rows]

    def tokens_of(self, row: int) -> IntArray:
        """Tokens of a live row, int32."""
        first, end = np.searchsorted(self.rows, (row, row + 1))
        return self.tokens[first:end]

    def without(self, dropped: NDArray[np.bool_]) -> StepOutput:
        """A copy without the tokens at which `dropped`, bool `[tokens]`, is true."""
        kept = ~dropped
        log_probs = None if self.log_probs is None else self.log_probs[kept]
        return replace(self, tokens=self.tokens[kept], rows=self.rows[kept], log_probs=log_probs)


def book_samples(
    plan: StepPlan,
    slots: RequestSlots,
    sampled: IntArray,
    counts: IntArray,
    log_probs: IntArray | None,
    verified: Verified | None = None,
) -> StepOutput:
    """Book the samples of a step, each row up to its first stop token.

    Args:
        plan: of the step.
        slots: per-request state.
        sampled, counts, log_probs: of `DynamicInferenceContext.update_requests`.
        verified: what the step's rows verified.
    """
    held = slots.generation[plan.slots] == plan.generations
    zombies = len(held) - int(np.count_nonzero(held))
    owners, widths = plan.slots, plan.widths
    if zombies or plan.num_decode < plan.num_rows:
        live = held & plan.produces
        owners, widths = owners[live], widths[live]
        sampled, counts = sampled[live], counts[live]
        log_probs = None if log_probs is None else log_probs[live]
    length = slots.num_known[owners]
    slots.count_back(owners, widths)
    tokens, rows = sampled[:, 0].copy(), np.arange(len(owners))
    stop_ids, failed = slots.stop_ids[owners], NO_SLOTS
    has_one = slots.max_width == 1 or np.count_nonzero(counts == 1) == len(counts)
    if has_one and not np.count_nonzero(tokens < 0):
        stopped = _is_any(stop_ids, tokens)
        slots.tokens[owners, length] = tokens
        end = length + 1
        is_first = length == slots.prompt_length[owners]
    else:
        is_token = np.arange(sampled.shape[1]) < counts[:, None]
        tokens, (rows, place) = sampled[is_token], np.nonzero(is_token)
        is_stop = stop_ids.take(rows, axis=0) == tokens[:, None]
        if np.count_nonzero(is_stop) or np.count_nonzero(tokens < 0):
            counts, stopped, without = _cut(sampled, counts, stop_ids)
            failed = owners[without]
            is_token = np.arange(sampled.shape[1]) < counts[:, None]
            tokens, (rows, place) = sampled[is_token], np.nonzero(is_token)
        else:
            stopped = np.zeros(len(owners), dtype=np.bool_)
        slots.tokens[owners[rows], length[rows] + place] = tokens
        end = length + counts
        is_first = (length == slots.prompt_length[owners]) & (counts > 0)
    slots.num_known[owners] = end
    if log_probs is not None:
        log_probs = log_probs[np.arange(log_probs.shape[1]) < (end - length)[:, None]]
    return StepOutput(
        step=plan.step,
        slots=owners,
        request_ids=slots.request_id[owners],
        tokens=tokens,
        rows=rows,
        is_first=is_first,
        stopped=stopped,
        ended=stopped | (end >= slots.max_length[owners]),
        failed_slots=failed,
        zombie_rows=zombies,
        log_probs=log_probs,
        verified=verified,
    )


def _is_any(ids: IntArray, tokens: IntArray) -> NDArray[np.bool_]:
    """Whether tokens, int32 `[rows]`, are among their rows' ids, int32 `[rows, ids]`."""
    if ids.shape[1] == 1:
        return ids[:, 0] == tokens
    return (ids == tokens[:, None]).any(axis=1)


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
    is_given = column < counts[:, None]
    is_stop = (stop_ids[:, None] == table[:, :, None]).any(axis=2)
    is_stop &= is_given & (table >= 0)
    stopped = is_stop.any(axis=1)
    if not (stopped.any() or (is_given & (table < 0)).any()):
        return counts, stopped, NO_SLOTS
    counts = np.where(stopped, is_stop.argmax(axis=1) + 1, counts)
    is_missing = (column < counts[:, None]) & (table < 0)
    failed = np.flatnonzero(is_missing.any(axis=1))
    counts[failed] = is_missing[failed].argmax(axis=1)
    return counts, stopped, failed
