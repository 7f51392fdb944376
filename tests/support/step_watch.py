"""`StepWatch`: what must hold of every step, whatever it serves: overlap, and the counters."""

import numpy as np

from megatron_async import DynamicInferenceEngine
from megatron_async.planning.request_slots import SlotState

MOST_TRIES = 100
"""More than there are requests, each of which may be evicted in one try."""


class StepWatch:
    """Looks at an idle engine before and after each of its steps."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self._lookahead = engine.lookahead
        self._steps = engine.statistics.steps
        self._overlapped = engine.statistics.overlapped_steps
        self._in_flight = 0
        self._drains = False
        self._must_launch = False
        self._tries = 0
        scheduler = engine.context.scheduler
        self._make_room = scheduler._make_room
        scheduler._make_room = self._make_some_room  # type: ignore[method-assign]

    def _make_some_room(self) -> bool:
        """The scheduler's, but not for ever: broken books could let it try again and again."""
        self._tries += 1
        assert self._tries <= MOST_TRIES, "planning is stuck"
        return self._make_room()

    def take_counts(self) -> None:
        """Steps were launched beside those that are watched, because the engine stopped."""
        self._steps = self._engine.statistics.steps
        self._overlapped = self._engine.statistics.overlapped_steps

    def before_step(self) -> None:
        """Note what the step will find."""
        engine = self._engine
        self._tries = 0
        self._in_flight = len(engine.in_flight)
        self._drains = engine.is_stopped or engine.invalidation.is_draining
        waits = self._drains or engine.loop.is_recovering
        waits |= self._in_flight > self._lookahead  # a signal came before the last resolve
        # An update may end or evict all, and steps that may be taken back are booked before it.
        waits |= engine.updating.is_due
        self._must_launch = not waits and self._can_launch()

    def after_step(self) -> None:
        """Check that the step launched what it could, waited for no more than it had to, and left
        the counters right."""
        engine = self._engine
        statistics = engine.statistics
        launched = statistics.steps - self._steps
        assert launched in (0, 1)
        assert launched or not self._must_launch, "a request could run, and none was launched"
        if self._drains:
            expected = 0
        elif launched:
            expected = min(self._in_flight + 1, self._lookahead)
            self._overlapped += self._in_flight > 0
        else:  # only a resolve can help
            expected = max(self._in_flight - 1, 0)
        in_flight = len(engine.in_flight)
        assert in_flight == expected, f"{in_flight} steps in flight instead of {expected}"
        assert statistics.overlapped_steps == self._overlapped, "a step did not overlap"
        self._steps += launched
        self._check_pending_samples()

    def _can_launch(self) -> bool:
        """Whether a request surely can run: it is in prefill, or decodes and its next token needs
        no new block, or it is the first in rank and there are as many as it needs."""
        slots, context = self._engine.context.slots, self._engine.context
        places = slots.num_blocks * context.block_size_tokens
        everywhere = np.arange(slots.capacity)
        decodes = slots.state >= SlotState.DECODING
        decodes &= slots.at_least(everywhere) < slots.max_length
        decodes &= slots.in_flight_steps < slots.most_in_flight  # of a grammar
        missing = np.maximum(slots.with_drafts(slots.places(everywhere, 1)) - places, 0)
        wanted = -(-missing // context.block_size_tokens)
        prefills = slots.state == SlotState.PREFILLING
        prefills &= slots.num_prefilled < slots.max_length - 1  # else a score, all launched
        if np.any(prefills) or np.any(decodes & (wanted == 0)):
            return True
        ready = np.flatnonzero(decodes)
        if not len(ready):
            return False
        first = ready[np.argmin(slots.rank[ready])]
        return bool(wanted[first] <= context.blocks.allocatable)

    def _check_pending_samples(self) -> None:
        """The samples that a slot waits for are those of its rows in flight."""
        if self._engine.invalidation.is_draining:
            return  # samples of steps that are discarded are taken back with the last of them
        slots = self._engine.context.slots
        pending = np.zeros(slots.capacity, dtype=np.int64)
        for step in self._engine.in_flight:
            plan = step.plan
            held = slots.generation[plan.slots] == plan.generations
            yields = held & plan.produces
            np.add.at(pending, plan.slots[yields], plan.widths[yields])
        used = slots.state != SlotState.FREE
        counted = slots.in_flight_tokens[used]
        assert (counted == pending[used]).all(), f"{counted} samples awaited, not {pending[used]}"
