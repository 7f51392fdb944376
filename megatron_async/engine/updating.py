"""`Updating`: new weights are committed between two steps, on all ranks before the same plan.

Each rank stages a round of weights and says so; only then the leader logs the update, before the
launch of the plan from which on the weights count. Steps in flight keep running: the copies are
enqueued behind them on the compute stream. So an update waits for nothing, and a replay of the log
finds it at the same place.

Leaders that share experts add one integer to the agreement of each step: minus the newest round
that is ready, or a round that has failed. The largest is minus the round that all have, or the one
that failed somewhere; all leaders know it before the same plan.
"""

from __future__ import annotations

import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import ref

from megatron_async.engine.turn import Turn
from megatron_async.engine.weight_books import LABEL, NEVER, POLICIES, Policy, WeightBooks
from megatron_async.errors import EngineStopped, RanksDisagree, UpdateError
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.ranks.actions import Update
from megatron_async.ranks.rank_group import RankGroup
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.requests.weight_versions import Version
from megatron_async.rollback.policy import Invalidation
from megatron_async.step.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)
from megatron_async.updates.stage import Stage


class _Loop(Protocol):
    """The parts of `StepLoop` that an update changes."""

    context: DynamicInferenceContext
    controller: TextGenerationController
    requests: RequestRegistry
    statistics: EngineStatistics
    weight_books: WeightBooks
    invalidation: Invalidation
    in_flight: deque[LaunchedStep]
    group: RankGroup
    turn: Turn
    is_closed: bool

    @property
    def is_stopped(self) -> bool: ...
    def drain(self) -> None: ...


class UpdateDone(NamedTuple):
    """What an update did."""

    step: int
    """The first step that runs with the new weights."""
    epoch: int
    """Updates of this engine so far."""
    version: Version
    aborted: int
    """Requests that it ended."""
    recomputed: int
    """Requests that lost what they had computed: they are prefilled again."""
    gap: float
    """Seconds for which the engine's thread launched nothing; the device's copies come on top."""


@dataclass
class _Round:
    number: int
    stage: Stage | None = None
    failure: str = ""
    frees: bool = False
    """Whether it was to write in place, and has not."""
    order: tuple[Version, Policy] | None = None
    staged: Future[None] = field(default_factory=Future)
    done: Future[UpdateDone] = field(default_factory=Future)


class Updating:
    """Updates the weights of an engine. `stage`, `fail`, `staged` and `commit` may be called on any
    thread.

    Args:
        loop: of the engine's steps.

    Attributes:
        epoch: updates so far. It alone tells keys and values apart; a version is a name.
        is_due: whether `tend` has something to do before the next plan.
        is_waiting: whether the last `tend` has left something that is due.
        awaits_agreement: whether leaders that share experts must agree on a step to go on.
        torn: why no step can run before other weights have come; "" if they are whole.
        writing: the open round that writes weights in place, so that no step runs meanwhile; 0 if
            there is none.
        event_loop: that runs the engine; None: nobody sleeps.
    """

    def __init__(self, loop: _Loop) -> None:
        self._loop_of = ref(loop)  # whose part this is
        self.epoch = 0
        self.is_due = self.is_waiting = self.awaits_agreement = False
        self.torn, self.writing = "", 0
        self.event_loop: AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._rounds: dict[int, _Round] = {}
        self._last, self._last_failure = 0, ""
        self._writer: ref[object] = ref(self)
        self._applying: _Round | None = None
        self._captures_again = False

    @property
    def _loop(self) -> _Loop:
        loop = self._loop_of()
        assert loop is not None, "it has this object"
        return loop

    @property
    def version(self) -> Version:
        """The version of the weights of the next step; None until one is told."""
        return self._loop.context.scheduler.weight_version

    # ---- On any thread -----------------------------------------------------------------------

    def begin(self, is_whole: bool) -> int:
        """The number of a new round, the same on all ranks that have had the same rounds.

        Raises:
            UpdateError: of `check_may_begin`.
        """
        self.check_may_begin(is_whole)
        with self._lock:
            number = max([self._last, *self._rounds]) + 1
            self._round(number)
            return number

    def stage(self, number: int, stage: Stage) -> None:
        """Round `number` is ready on this rank.

        Raises:
            UpdateError: the round has ended, because another rank has failed; the stage is dropped.
        """
        try:
            with self._lock:
                self._round(number).stage = stage
        except UpdateError:
            stage.drop()
            raise
        self._report(number, "")

    def fail(self, number: int, why: str, has_written: bool = True) -> None:
        """This rank cannot stage round `number`: the round fails on all ranks. One that has ended
        stays as it is. If it was `writing`, the weights are torn, unless it has written nothing."""
        with self._lock:
            if self._has_ended(number):
                return
            found = self._round(number)
            found.failure = found.failure or why
            if number == self.writing:
                self.writing, found.frees = 0, not has_written
                self.torn = self.torn or (why if has_written else "")
        self._report(number, why)

    def staged(self, number: int) -> Future[None]:
        """On the leader: done when the round is staged on all ranks of its model; UpdateError if it
        has failed."""
        with self._lock:
            found = self._round(number).staged
        self._news()
        return found

    def commit(self, number: int, version: Version, policy: Policy = "keep") -> Future[UpdateDone]:
        """On the leader: commit the round as soon as it is staged everywhere, at the next plan, or
        at once if the engine is idle or stopped. Where leaders share experts, each must call this.

        Returns:
            done when the copies are enqueued; UpdateError: the round has failed, and the weights
            are those before.

        Raises:
            UpdateError: the policy has another name, or the round has ended.
        """
        check_order(version, policy)
        with self._lock:
            found = self._round(number)
            found.order = version, policy
        self._news()
        return found.done

    def _round(self, number: int) -> _Round:
        if self._has_ended(number):
            why = self._last_failure if number == self._last else ""
            raise UpdateError(why or f"round {number} has ended: begin another.")
        return self._rounds.setdefault(number, _Round(number))

    def _has_ended(self, number: int) -> bool:
        return number <= self._last and number not in self._rounds

    def _report(self, number: int, failure: str) -> None:
        self._loop.group.staged(number, failure)
        self._news()

    def _news(self) -> None:
        if self._loop.group.follows or self._loop.is_closed:
            return
        self.is_due = True
        if (loop := self.event_loop) is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._loop.requests.wake)

    # ---- Before a plan -----------------------------------------------------------------------

    def tend(self) -> bool:
        """On the leader, in a turn, before a plan: commit what is ready, drop what has failed.

        Returns:
            whether the next step may be planned.
        """
        may_plan, self.awaits_agreement = True, False
        with self._lock:
            rounds = [self._rounds[number] for number in sorted(self._rounds)]
        for each in rounds:
            is_everywhere, failure = self._loop.group.staged_by_all(each.number)
            if failure := each.failure or failure or self._failure_elsewhere(each):
                self._fail(each, failure)
            elif each.stage is not None and is_everywhere:
                if not each.staged.done():
                    each.staged.set_result(None)
                if each.order is not None and self._is_agreed(each):
                    may_plan = self._commit(each)
            if self.awaits_agreement or not may_plan:
                break
        may_plan = may_plan and self._capture_again()
        with self._lock:
            is_waiting = not may_plan or any(map(_needs_others, self._rounds.values()))
            self.is_waiting = self.is_due = is_waiting
        return may_plan

    def _failure_elsewhere(self, each: _Round) -> str:
        group = self._loop.group
        if group.agrees and group.agreed >= each.number:
            return f"round {each.number} of weights has failed on another replica."
        return self._without_memory()

    def _without_memory(self) -> str:
        """Why weights cannot be written, if a suspended engine has given their memory back."""
        memory = self._loop.context.memories.get("weights")
        if memory is None or memory.is_there:
            return ""
        return "the memory of the weights is given back: call resume(['weights']) first."

    def _is_agreed(self, each: _Round) -> bool:
        group = self._loop.group
        if group.agrees:
            group.vote = -each.number
            self.awaits_agreement = -group.agreed < each.number
        return not self.awaits_agreement

    def _fail(self, each: _Round, failure: str) -> None:
        """Drop a round here and on the followers; leaders that share experts learn of it first."""
        group = self._loop.group
        each.failure = failure
        if group.agrees and group.agreed < each.number:
            group.vote, self.awaits_agreement = each.number, True
            return
        group.updating(Update(each.number, self._step, self.version, LABEL, failure))
        self._end_failed(each)

    def _end_failed(self, each: _Round) -> None:
        if each.stage is not None:
            each.stage.drop()
        self._forget(each, each.failure)
        if each.number == self.writing:
            self.writing, self.torn = 0, self.torn or each.failure
        if each.frees:
            self._go_on()
        for future in (each.staged, each.done):
            if not future.done():
                future.set_exception(UpdateError(each.failure))

    def _commit(self, each: _Round) -> bool:
        """Log and do an update, unless steps in flight may be taken back: these first."""
        loop = self._loop
        if loop.invalidation.takes_back and loop.in_flight:
            loop.statistics.drained = True
            return False
        assert each.order is not None, "it was told to commit"
        version, policy = each.order
        loop.group.updating(Update(each.number, self._step, version, policy))
        self._apply(each, version, policy)
        return True

    @property
    def _step(self) -> int:
        return self._loop.context.next_step

    def _forget(self, each: _Round, failure: str = "") -> None:
        with self._lock:
            self._rounds.pop(each.number, None)
            if each.number > self._last:
                self._last, self._last_failure = each.number, failure

    # ---- On every rank -----------------------------------------------------------------------

    def replay(self, action: Update) -> None:
        """On a follower: do what the leader did.

        Raises:
            RanksDisagree: the round is not staged here, or its copies raised.
        """
        with self._loop.turn:
            if action.policy == LABEL and not action.failure:
                self._loop.weight_books.change(action.version, LABEL)
                return
            with self._lock:
                found = self._rounds.get(action.number) or _Round(action.number)
            if action.failure:
                found.failure = action.failure
                self._end_failed(found)
                return
            if found.stage is None:
                raise RanksDisagree(
                    f"the leader commits round {action.number} of weights, which is not staged "
                    "here: it is a bug."
                )
            policy: Any = action.policy
            self._apply(found, action.version, policy)
            if self.torn:
                raise RanksDisagree(self.torn)

    def label(self, version: Version) -> None:
        """The weights are called `version` from the next plan on; nothing else changes. On the
        leader, on the engine's thread."""
        check_order(version, POLICIES[0])
        loop = self._loop
        loop.turn.make_whole()
        with loop.turn:
            loop.group.updating(Update(0, self._step, version, LABEL))
            self._loop.weight_books.change(version, LABEL)

    def _apply(self, each: _Round, version: Version, policy: Policy) -> None:
        start = time.perf_counter()
        assert each.stage is not None
        self.epoch += 1
        each.order, self._applying = (version, policy), each
        try:
            moved = each.stage.commit()
        except Exception as error:
            self._broke_off(each, error)
            return
        self._captures_again |= moved
        each.stage = None  # all of it is enqueued
        aborted, recomputed = self._loop.weight_books.change(version, policy)
        self._finish(each, aborted, recomputed, time.perf_counter() - start)

    def _finish(self, each: _Round, aborted: int, recomputed: int, gap: float) -> None:
        self._loop.statistics.weight_updates += 1
        self._forget(each)
        held = self.torn or self.writing
        self._applying, self.torn, self.writing = None, "", 0
        if held:
            self._go_on()
        with self._lock:
            older = [self._rounds[n] for n in sorted(self._rounds) if n < each.number]
        for other in older:
            other.failure = f"round {other.number} has ended: round {each.number} came first."
            self._end_failed(other)
        if not each.done.done():
            each.done.set_result(
                UpdateDone(self._step, self.epoch, self.version, aborted, recomputed, gap)
            )

    def _broke_off(self, each: _Round, error: BaseException) -> None:
        """Nobody knows which of its copies are enqueued."""
        self.torn = f"round {each.number} of weights broke off in its copies: {error!r}."
        each.failure, self._applying = self.torn, None
        self._end_failed(each)

    def mend(self, error: BaseException) -> None:
        """A turn was cut short by `error`, and the steps in flight are dropped."""
        self._loop.weight_books.pass_border(NEVER - 1)
        if (each := self._applying) is None or each.order is None:
            return
        if each.stage is not None:
            self._broke_off(each, error)
        else:
            self._loop.weight_books.change(*each.order)
            self._finish(each, 0, len(self._loop.requests), 0.0)

    # ---- Weights that are not whole ----------------------------------------------------------

    def check_may_begin(self, is_whole: bool, number: int = 0) -> None:
        """Raise UpdateError while another round than `number` writes in place or the memory is
        away, and where only a round of all weights may come, and this is none; EngineStopped if the
        engine is closed."""
        if self._loop.is_closed:
            raise EngineStopped("the engine is closed: its weights are updated no more.")
        if failure := self._without_memory():
            raise UpdateError(failure)
        if self.writing not in (0, number):
            if self._writer() is not None:
                raise UpdateError(
                    "weights are being written in place: finish or drop that round first."
                )
            self.tear("who wrote them in place is gone")
        if self.torn and not is_whole:
            raise UpdateError(
                f"the engine's weights are not whole ({self.torn}): send all of them, without "
                "partial and selector."
            )

    def write_in_place(self, number: int, writer: object) -> None:
        """Launch no step until round `number` ends, or its `writer` is gone: it writes weights in
        place. Steps in flight go on.

        Raises:
            UpdateError: a suspended engine has given their memory back.
        """
        if failure := self._without_memory():
            raise UpdateError(failure)
        self.writing, self._writer = number, ref(writer)

    def tear(self, why: str) -> None:
        """The weights are lost: launch no step until others have come."""
        if self.writing:
            self.fail(self.writing, why)
        self.torn, self.writing = why, 0

    def _go_on(self) -> None:
        """No weights are waited for any more, unless they are torn."""
        loop = self._loop
        if not (self.torn or self.writing):
            loop.group.stop_together(loop.is_stopped)
            loop.requests.news.notify()

    def close(self, error: BaseException | None = None) -> None:
        """The engine ends, for `error` if for any: open rounds are dropped."""
        with self._lock:
            rounds = list(self._rounds.values())
        for each in rounds:
            each.failure = str(error or "the engine was closed before the round was committed.")
            self._end_failed(each)

    def _capture_again(self) -> bool:
        """Capture steps on the addresses of weights that lie elsewhere now; steps in flight are
        resolved first. Whether that is done."""
        if not self._captures_again:
            return True
        loop = self._loop
        if loop.in_flight:
            loop.statistics.drained = True
            return False
        if loop.controller.graphs.count:
            loop.controller.graphs.clear()
            loop.controller.recapture_cuda_graphs()
        self._captures_again = False
        return True


def check_order(version: Any, policy: Any) -> None:
    """Raise UpdateError unless these are a `Version` and a `Policy`."""
    if version is not None and (isinstance(version, bool) or not isinstance(version, str | int)):
        raise UpdateError(f"version={version!r} must be a text or an integer.")
    if policy not in POLICIES:
        raise UpdateError(f"policy={policy!r} is none of {', '.join(POLICIES)}.")


def _needs_others(each: _Round) -> bool:
    """Whether something is to be done as soon as other ranks have answered."""
    return bool(each.failure or each.order) or (each.stage is not None and not each.staged.done())
