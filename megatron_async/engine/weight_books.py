"""`WeightBooks`: what a change of weights does to the books: to requests, to the prefix cache, and
to the versions of tokens and of keys and values."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_async.engine.listener import EngineListener
from megatron_async.engine.step_booking import StepBooking
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.request_slots import SlotState
from megatron_async.requests.inference_request import Status
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.requests.weight_versions import Version
from megatron_async.step.text_generation_controller import LaunchedStep

Policy = Literal["keep", "recompute", "abort"]
"""What becomes of requests that have tokens: they go on with the keys and values that they have;
all of these are computed again; or they end with the tokens so far, finish reason "weight_update".
A request without a token begins again under each."""
POLICIES = ("keep", "recompute", "abort")
LABEL = "label"
"""In the place of a policy: no weights come, the version alone is another."""
NEVER = sys.maxsize


class _Border(NamedTuple):
    """The first step of some weights; the steps before it are not all booked yet."""

    step: int
    version: Version
    held: NDArray[np.int64]
    """Slots whose requests have keys and values of the weights before."""
    generations: NDArray[np.int64]


class WeightBooks:
    """Changes the books between two plans. All follows from the plan's number and the policy, so
    followers and replays of a recording do the same.

    Args:
        context: of the engine.
        requests: the unfinished ones.
        booking: of steps; a request that ends is released by it.
        listeners: are told.
        in_flight: launched steps, oldest first.

    Attributes:
        border: first step whose booking must wait for `pass_border`.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        requests: RequestRegistry,
        booking: StepBooking,
        listeners: Sequence[EngineListener],
        in_flight: deque[LaunchedStep],
    ) -> None:
        self._context, self._requests, self._booking = context, requests, booking
        self._listeners, self._in_flight = listeners, in_flight
        self._borders: list[_Border] = []
        self.border = NEVER

    def change(self, version: Version, policy: str) -> tuple[int, int]:
        """Do what an update does to the books; a replay of a recording does nothing else.

        Args:
            version: of what is planned from now on.
            policy: a `Policy`, or `LABEL`.

        Returns:
            how many requests it ended, and how many are to be prefilled again.
        """
        found = (0, 0)
        if policy != LABEL:
            found = self._begin_again(policy)
            self._context.reset_prefix_cache()
        self._change(version, policy)
        return found

    def _begin_again(self, policy: str) -> tuple[int, int]:
        """Do what the policy says of unfinished requests."""
        context, slots, keeps, aborted = self._context, self._context.slots, policy == "keep", 0
        for request in self._requests.unfinished():
            if request.request_id in self._requests.compiling:
                continue
            slot, tokens = slots.slot_of.get(request.request_id), len(request.generated_tokens)
            if slot is not None:
                end = slots.at_least(slot) if keeps else slots.num_known[slot]
                tokens = int(end) - len(request.prompt_tokens)
            if tokens <= 0:
                continue
            request.version_lag += 1
            if policy == "abort" or request.is_stale:
                if slot is None:
                    context.waiting.remove(request.request_id)
                else:
                    self._booking.release(slot)
                reason = "stale" if request.is_stale else "weight_update"
                for listener in self._listeners:
                    listener.ended(request, reason)
                self._requests.end(request, Status.COMPLETED, reason)
                aborted += 1
        # A prompt that is half computed has made no token yet.
        again = slots.state == SlotState.PREFILLING if keeps else slots.state != SlotState.FREE
        context.scheduler.evict(again)
        for request in context.waiting.in_order():
            if request.routing is not None and not (keeps and request.generated_tokens):
                request.routing.forget()
            if not request.generated_tokens:
                request.num_cached_tokens = None
                if request.log_probs is not None:
                    request.log_probs.forget_prompt()
        return aborted, int(np.count_nonzero(again))

    def _change(self, version: Version, policy: str) -> None:
        """What is planned from now on is of other weights, or of another name."""
        context, slots, step = self._context, self._context.slots, self._context.next_step
        context.scheduler.weight_version = version
        if policy == LABEL:
            for slot in context.scheduler.prefilling:
                request, end = slots.request_at(slot), int(slots.num_prefilled[slot])
                request.weights.change(version, len(request.generated_tokens), end)
        else:
            self._booking.drafts_before = (step, step + slots.num_micro_batches)
        held = np.flatnonzero(slots.state >= SlotState.DECODING)
        self._borders.append(_Border(step, version, held, slots.generation[held]))
        self.border = self._borders[0].step
        for listener in self._listeners:
            listener.updated(step, version, policy)
        if not self._in_flight:
            self.pass_border(step)

    def pass_border(self, step: int) -> None:
        """The steps before `step` are booked: what requests have now is of the weights before the
        borders up to there. May be repeated."""
        slots = self._context.slots
        while self._borders and self._borders[0].step <= step:
            border = self._borders[0]
            kept = border.held[slots.generation[border.held] == border.generations]
            has_old = set(kept.tolist())  # sync-ok: NumPy
            for request in self._requests.unfinished():
                slot = slots.slot_of.get(request.request_id)
                generated = len(request.generated_tokens if slot is None else slots.generated(slot))
                position = len(request.prompt_tokens) + generated - 1
                is_old = slot in has_old
                request.weights.change(border.version, generated, position if is_old else None)
            del self._borders[0]
        self.border = self._borders[0].step if self._borders else NEVER
