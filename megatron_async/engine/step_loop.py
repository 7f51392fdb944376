"""`StepLoop`: an engine's steps. They are planned and launched one after the other, and resolved
oldest first."""

from __future__ import annotations

import time
from collections import deque
from copy import copy
from itertools import islice
from types import TracebackType
from weakref import WeakMethod

from megatron_async.engine.arrival import arrival
from megatron_async.engine.late_launch import launching_of
from megatron_async.engine.listener import EngineListener
from megatron_async.engine.prefill_limit import prefill_limit_of
from megatron_async.engine.step_booking import StepBooking
from megatron_async.engine.turn import Turn
from megatron_async.engine.updating import Updating
from megatron_async.engine.weight_books import WeightBooks
from megatron_async.errors import JobFailed, RanksDisagree
from megatron_async.observe.statistics import EngineStatistics, NoOverlapReason
from megatron_async.planning.step_plan import StepPlan, StepShape
from megatron_async.ranks.rank_group import RankGroup
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.rollback.policy import make_invalidation
from megatron_async.step.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)
from megatron_async.text.token_watch import TokenWatch


class StepLoop:
    """Launches steps without waiting, waits for their samples, and has them booked.

    Args:
        controller: runs steps on the device; its context plans them.
        group: the ranks that hold the model together.
        requests: the unfinished ones.
        statistics: counts.
        watch: says which tokens may end a request by its text.
        listeners: get the events of requests and steps, in order.

    Attributes:
        in_flight: launched steps, oldest first.
        lookahead: steps that may be unresolved when another is prepared.
        group: agrees on steps with other ranks, and logs what is done; `join` changes it.
        invalidation: the policy for steps in flight when a request that they serve ends.
        launching: for how long the next launch may wait (`InferenceConfig.late_launch`).
        booking: books a resolved step.
        turn: within which the books change; Ctrl-C takes effect between turns, and in waits.
        updating: commits new weights between two steps.
        weight_books: what they change in the books.
        is_paused, is_suspended, is_closed: for which no step is launched; `Pausing` sets them.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        group: RankGroup,
        requests: RequestRegistry,
        statistics: EngineStatistics,
        watch: TokenWatch,
        listeners: list[EngineListener],
    ) -> None:
        context = controller.context
        self.controller, self.context, self.tracer = controller, context, context.tracer
        self.requests, self.statistics, self.listeners = requests, statistics, listeners
        self.group = group
        self.lookahead = context.config.steps_in_flight - 1
        self.in_flight: deque[LaunchedStep] = deque()
        self.invalidation = make_invalidation(context, self.in_flight, statistics)
        self._prefill_limit = prefill_limit_of(context, statistics, listeners)
        self.launching = launching_of(context, self.in_flight, statistics, listeners)
        self.booking = StepBooking(
            context, requests, statistics, self.invalidation, watch, listeners
        )
        self.turn = Turn(WeakMethod(self._mend))
        self.weight_books = WeightBooks(context, requests, self.booking, listeners, self.in_flight)
        self.updating = Updating(self)
        self.is_paused = self.is_suspended = self.is_closed = False
        self._recovers_until = -1
        self._loss: JobFailed | None = None

    def join(self, group: RankGroup) -> None:
        """Step with the ranks of `group` from now on: where a service begins, and where it ends."""
        self.group = group

    @property
    def is_stopped(self) -> bool:
        """Whether no step may be launched."""
        updating = self.updating
        return bool(
            self.is_paused or self.is_suspended or self.is_closed or updating.torn
            or updating.writing
        )  # fmt: skip

    @property
    def has_other_work(self) -> bool:
        """Whether there is something to do or to report, beside waiting for grammars."""
        own = bool(self.requests.has_ended or self.booking.undelivered or self.in_flight)
        own = own or self.context.has_unfinished_requests()
        return own or self.group.others_work or self.group.others_wait

    @property
    def only_waits(self) -> bool:
        """Whether there is nothing to do until a grammar, or other ranks' weights, are there."""
        waits = bool(self.requests.compiling) or self.updating.is_waiting
        return waits and not self.has_other_work

    # ---- Launch ------------------------------------------------------------------------------

    def launch_next(self) -> LaunchedStep | None:
        """Plan the next step and launch it: `DynamicInferenceEngine.launch_step`."""
        self.turn.make_whole()
        if self.updating.is_due and not self.tend_updates():
            return None
        if self.is_stopped or self.invalidation.is_draining or self.is_recovering:
            agrees = self.updating.awaits_agreement and not self.in_flight
            return self.launch_dummy() if agrees and not self.is_closed else None
        if len(self.in_flight) > self.lookahead:
            return None  # a wait was interrupted, or another coroutine is in one
        if self.requests.compiling and self.only_waits and not self.updating.awaits_agreement:
            return None
        with self.turn:
            context, statistics, start = self.context, self.statistics, time.thread_time_ns()
            tracer, step = self.tracer, context.next_step
            limit = self.group.launching(step, self._prefill_limit.limit())
            with tracer.planning(step), tracer.range("prepare_step", step):
                plan = context.prepare_step(self._agree, limit)
            spent = time.thread_time_ns() - start
            blocks = context.blocks.total - context.blocks.allocatable
            statistics.count_prepare(spent, blocks, context.max_requests - context.slots.num_free)
            if plan is not None:
                return self._launch(plan)
            stuck = not self.in_flight and context.has_unfinished_requests()
            assert not stuck, "requests are unfinished, but none can run: a bug in scheduling"
            statistics.note_no_overlap(NoOverlapReason.NOTHING_TO_PLAN)
            for listener in self.listeners:
                listener.launched(None)
            return None

    def tend_updates(self) -> bool:
        """Commit new weights that are ready; whether the next step may be planned."""
        with self.turn:
            return self.is_closed or self.updating.tend()

    def launch_dummy(self) -> LaunchedStep | None:
        """Launch a step without a request of this rank; None if no other rank needs it."""
        with self.turn:
            step = self.context.next_step
            with self.tracer.planning(step), self.tracer.range("prepare_step", step):
                plan = self.context.prepare_dummy_step(self._agree)
            return None if plan is None else self._launch(plan)

    def _agree(self, step: int, wanted: StepShape, has_work: bool) -> StepShape:
        """Requests that wait for their grammars count as work for other ranks."""
        with self.tracer.range("agree_shape", step if self.group.agrees else -1):
            return self.group.agree(step, wanted, has_work or bool(self.requests.compiling))

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Copy a plan to the device and enqueue its step there.

        A launch that raises becomes a step that failed: its resolve ends its requests and no
        others.
        """
        in_flight, lookahead = self.in_flight, self.lookahead
        assert len(in_flight) <= lookahead, "it would overwrite samples that are not booked"
        context, statistics, tracer = self.context, self.statistics, self.tracer
        start = time.thread_time_ns()
        self.group.planned(plan)
        for listener in self.listeners:
            listener.launching(plan)
        with tracer.of_step(plan):
            try:
                with tracer.range("transfer_bookkeeping_to_gpu", plan.step):
                    context.transfer_bookkeeping_to_gpu(plan)
                self.invalidation.before_launch(plan)
                with tracer.range("launch_step", plan.step):
                    launched = self.controller.enqueue_step(plan)
            except Exception as error:
                self.group.launch_failed(plan.step, error)
                launched = self.controller.enqueue_failed_step(plan, error)
        statistics.count_launch(
            plan.num_rows,
            len(plan.prefill_token_ids),
            plan.dims.is_captured,
            bool(in_flight),
            lookahead,
        )
        in_flight.append(launched)
        if launched.awaits_masks:
            self.send_masks()
        statistics.count_launch_time(time.thread_time_ns() - start)
        for listener in self.listeners:
            listener.launched(plan)
        return launched

    def send_masks(self) -> None:
        """Enqueue the sampling of every constrained row in flight whose earlier tokens are booked.

        Called after every launch and every resolve. So the mask of a request with one sample in
        flight has been sent, and the request may be in the next step: no row waits for another
        row's mask. The samples of a step are copied when all of its rows are sampled; rows of ended
        requests need no mask.
        """
        tracer = self.tracer
        for step in self.in_flight:
            if step.awaits_masks:
                with tracer.of_step(step.plan), tracer.range("send_masks", step.plan.step):
                    self._send_masks_of(step)

    def _send_masks_of(self, step: LaunchedStep) -> None:
        slots, plan, rows = self.context.slots, step.plan, step.unsampled_rows
        rows = rows[slots.generation[plan.slots[rows]] == plan.generations[rows]]
        is_known = slots.num_known[plan.slots[rows]] == plan.kv_at_most[rows]
        step.unsampled_rows, rows = rows[~is_known], rows[is_known]
        if len(rows):
            masks = self.controller.masks_for(step, rows)
            for slot, mask in zip(plan.slots[rows], masks, strict=True):
                request_id = int(slots.request_id[slot])
                grammar = self.requests.get(request_id).grammar
                assert grammar is not None, "its feature says that it has one"
                grammar.mask(mask)
                if grammar.is_too_slow:
                    self.requests.is_too_slow(request_id)
        is_last = len(step.unsampled_rows) == 0
        if is_last or len(rows):
            self.controller.sample_constrained(step, len(rows), is_last=is_last)

    # ---- Resolve -----------------------------------------------------------------------------

    def due(self, launched: LaunchedStep | None) -> list[LaunchedStep]:
        """The steps to be resolved now, oldest first, after `launch_next` has returned `launched`:
        those beyond `lookahead`; one if nothing could be launched; all if nothing may be."""
        in_flight = self.in_flight
        if self.is_closed:
            return []
        if self.is_stopped or self.invalidation.is_draining:
            return list(in_flight)
        at_least = 1 if launched is None else 0  # or nothing changes
        return list(islice(in_flight, max(len(in_flight) - self.lookahead, at_least)))

    def resolve(self, step: LaunchedStep) -> bool:
        """Wait for the samples of a step in flight, and book them; returns what `book` does."""
        with self.tracer.of_step(step.plan):
            with self.tracer.range("resolve", step.plan.step):
                self.group.wait(step.ready)
            return self.book(step)

    async def resolve_async(self, step: LaunchedStep) -> bool:
        """`resolve`; other coroutines run during the wait."""
        with self.tracer.awaited("resolve", step.plan):
            await arrival(step.ready, self.group.wait_async)
        return self.book(step)

    def book(self, step: LaunchedStep) -> bool:
        """Book the oldest step in flight, whose samples have arrived, unless it is discarded.

        Returns:
            False: `step` is not the oldest any more. While a coroutine waited, another one booked
            the step or closed the engine; or a mending has dropped all steps.
        """
        with self.tracer.of_step(step.plan), self.turn:
            if self.is_closed or not self.in_flight or self.in_flight[0] is not step:
                return False
            start = time.thread_time_ns()
            self.in_flight.popleft()
            self.group.resolving(step)
            if self.invalidation.discards(step):
                for later in self.in_flight:
                    if later.awaits_masks:  # which depend on tokens that are not booked now
                        self.controller.sample_constrained(later, 0, is_last=True)
                return True
            if step.plan.step >= self.weight_books.border:
                self.weight_books.pass_border(step.plan.step)
            output = self.booking.book(step)
            self.requests.readers.booked(output.request_ids, output.is_first)
            for listener in self.listeners:
                listener.booked(output)
            self.send_masks()
            is_zombie = step.error is None and 0 < output.zombie_rows == step.plan.num_rows
            self.statistics.count_resolve(time.thread_time_ns() - start, is_zombie)
            for listener in self.listeners:
                listener.resolved(step)
            if step.error is not None and self.in_flight:
                # The failed step may not have told the device whose blocks are whose. Steps after
                # it then wrote keys and values by tables of former owners, into any request's.
                # Their samples are dropped, and all requests are prefilled again, to the same
                # tokens.
                self.context.evict_all()
                self._recovers_until = self.in_flight[-1].plan.step
            return True

    def resolve_oldest(self) -> None:
        """Wait for the oldest step in flight (IndexError if there is none), and book it: its output
        goes to the next report."""
        self.turn.make_whole()
        self.resolve(self.in_flight[0])

    def resolve_down_to(self, count: int) -> None:
        """Resolve until at most `count` steps are in flight."""
        while len(self.in_flight) > count and not self.is_closed:
            self.resolve_oldest()

    def drain(self) -> None:
        """Stop with the other ranks and resolve all steps in flight; their outputs go to the next
        report."""
        with self.giving_up():
            self.group.stop_together(True)
            while self.group.must_keep_up:
                # First: an `async_step` that waits for samples has as many steps in flight as there
                # are buffers, and a further one would overwrite the samples of the oldest.
                self.resolve_down_to(self.lookahead)
                if not self.updating.is_due or self.tend_updates():
                    self.launch_dummy()
            self.resolve_down_to(0)
        self.statistics.drained = True
        if self.booking.undelivered:  # also where the engine's loop waits for requests
            self.requests.wake()

    @property
    def is_recovering(self) -> bool:
        """Whether steps are in flight whose samples are dropped because a step before them failed.

        No step is launched meanwhile: if these steps fail too, they would evict its requests, which
        would fail with no step and begin again for ever.
        """
        return bool(self.in_flight) and self.in_flight[0].plan.step <= self._recovers_until

    # ---- What goes wrong ---------------------------------------------------------------------

    def _mend(self, error: BaseException) -> None:
        """`error` has cut a turn short: make the books whole. Requests of a step whose tokens were
        just being booked fail with the error; all others are prefilled again, to the same tokens.
        May be called again if it raises.

        The books of the schedule (slots, blocks, plans, the prefix cache) all follow from the
        unfinished requests and their known tokens. So whatever state they are in, they are thrown
        away and written anew, as after an eviction of everybody. What is known of requests is
        written in an order that tells how far it came: `StepBooking`, `RequestRegistry.end`.

        With other ranks, which did what this rank did not, the engine gives up instead.
        """
        if self.is_closed or self.is_lost:
            return
        if not self.group.is_alone:
            self._give_up_for(error)
            return
        context, requests = self.context, self.requests
        context.device.wait()  # before its rings and slots are used again
        self.in_flight.clear()
        self.invalidation.forget()
        self._recovers_until = -1
        self.booking.mend(error)
        self.updating.mend(error)
        requests.withdraw_entering()
        unfinished = requests.unfinished()
        context.start_again([r for r in unfinished if r.request_id not in requests.compiling])
        requests.readers.wake_all()
        requests.wake()
        for listener in self.listeners:
            listener.mended(error)

    def _give_up_for(self, error: BaseException) -> None:
        try:
            with self.giving_up():
                raise RanksDisagree(
                    f"{error!r} has cut this rank short in the middle of an action, which other "
                    "ranks of its model may have done: start the job again."
                ) from error
        except JobFailed:
            if isinstance(error, Exception):
                raise

    @property
    def is_lost(self) -> bool:
        """Whether the engine has given up because other ranks of its model are lost."""
        return self._loss is not None

    def check_not_lost(self) -> None:
        """Raise what the engine gave up for, if it has."""
        if self._loss is not None:
            raise copy(self._loss) from self._loss

    def giving_up(self) -> _GivingUp:
        """`with` it around work with other ranks. If these are lost, all requests fail, and the
        followers are informed.

        Raises:
            JobFailed: the ranks are lost, or were before.
        """
        return _GivingUp(self)

    def give_up(self, error: JobFailed) -> None:
        """Fail all requests with `error`, and inform the followers; requests keep their tokens."""
        self._loss = error
        self.requests.fail_all(error, self.context.slots)
        self.updating.close(error)
        self.group.close(error)


class _GivingUp:
    """No generator of `contextlib`, which takes a microsecond more in each step."""

    __slots__ = ("_loop",)

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.check_not_lost()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, JobFailed):
            self._loop.give_up(error)
