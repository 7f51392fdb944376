"""`Leader`: the rank of a model that gets requests from callers; it logs its actions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, override

from megatron_async.errors import RanksDisagree
from megatron_async.interrupts import HeldInterrupts
from megatron_async.planning.step_plan import StepPlan
from megatron_async.ranks.actions import (
    Abort,
    Action,
    Add,
    Close,
    Compile,
    Control,
    Failed,
    Import,
    Launch,
    Release,
    Resolve,
    Staged,
    Tell,
    Told,
    Turn,
    Update,
)
from megatron_async.ranks.plan_digest import PlanComparer, plan_digest, sample_digest
from megatron_async.ranks.rank_group import Channel, ConnectedGroup
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.moved_request import MovedRequest
from megatron_async.step.text_generation_controller import LaunchedStep

CONFIRMATION_TIMEOUT_S = 5.0
"""Seconds. Ranks launch a step together, so a failure on all ranks occurs within a step's time."""
TOLD_EVERY_S = 1e-3
"""Seconds between two looks whether followers have taken in what they were told."""


class Leader(ConnectedGroup):
    """The rank whose callers add requests.

    Args:
        channel: to the followers.
        check_alive: raises RankLost if a rank died that steps need.
        check_agreement: compare the digests that followers report.
    """

    def __init__(
        self,
        channel: Channel,
        check_alive: Callable[[], None],
        check_agreement: bool = False,
    ) -> None:
        super().__init__(channel, check_alive, check_agreement)
        self._pending: list[Action] = []
        self._comparer = PlanComparer()
        self._failed: dict[int, dict[int, str]] = {}
        """Step -> follower -> error, of steps that failed there and are not yet booked here."""
        self._failed_since: dict[int, float] = {}
        self._is_closed = False
        self._tells = 0
        self._told = dict.fromkeys(channel.members[1:], 0)
        """Follower -> number of the last `Tell` that it has taken in."""
        self._staged: dict[int, dict[int, str]] = {}
        """Open rounds of weights -> follower -> why it cannot stage the round; "" if it has."""

    def compiling(self, request: DynamicInferenceRequest) -> None:
        self.log(Compile(request.sampling_params))

    def added(self, request: DynamicInferenceRequest) -> None:
        if request.num_moved is not None:
            moved = MovedRequest.of(request, request.generated_tokens)
            self._pending.append(Import(request.request_id, moved))
            return
        tokens = request.prompt_tokens.astype("int32").tobytes()
        params = request.sampling_params
        trace = request.traceparent
        self._pending.append(Add(request.request_id, tokens, params, request.priority, trace))

    def aborted(self, request_id: int) -> None:
        self._pending.append(Abort(request_id))

    def controlled(self, method: str, *arguments: Any) -> None:
        self.log(Control(method, [*arguments]))

    def launching(self, step: int, prefill_limit: int) -> int:
        self.log(Launch(step, prefill_limit=prefill_limit))
        return prefill_limit

    def planned(self, plan: StepPlan) -> None:
        if self._checks:
            self._comparer.expect(plan.step, plan_digest(plan))

    def resolving(self, step: LaunchedStep) -> None:
        number, error = step.plan.step, step.error
        self.log(Resolve(number))
        if self._checks and error is None:
            self._comparer.expect(number, sample_digest(step))
        self._read_reports()
        if error is not None:
            self._confirm_failure(number, error)
        elif early := [failed for failed in self._failed if failed <= number]:
            self._raise_for(min(early))

    @override
    def staged_by_all(self, number: int) -> tuple[bool, str]:
        self._check_alive()
        self._read_reports()
        found = self._staged.get(number, {})
        failures = (f"rank {rank}: {why}" for rank, why in found.items() if why)
        return found.keys() == self._told.keys(), next(failures, "")

    @override
    def updating(self, update: Update) -> None:
        self.log(update)
        self._staged = {n: found for n, found in self._staged.items() if n > update.number}

    @override
    def tell(self, what: str, value: Any = None) -> None:
        self._tells += 1
        self.log(Tell(self._tells, what, value))

    @override
    async def until_told(self) -> None:
        wanted = self._tells
        while not self._is_closed and any(told < wanted for told in self._told.values()):
            self._check_alive()
            self._look()
            await asyncio.sleep(TOLD_EVERY_S)

    def release(self) -> None:
        self.log(Release())

    def close(self, error: BaseException | None = None) -> None:
        if self._is_closed:
            return
        try:
            self.log(Close(None if error is None else repr(error)))
        finally:
            self._is_closed = True
            self._channel.close()

    def log(self, action: Action) -> None:
        """Send an action, and those that wait, in one message."""
        if self._is_closed:  # nobody listens any more
            return
        with HeldInterrupts():  # also outside of a turn: an action is sent once
            pending, self._pending = [*self._pending, action], []
            self._channel.send(Turn(pending))

    def _read_reports(self) -> None:
        for rank, report in self._channel.reports():
            if isinstance(report, Told):
                self._told[rank] = report.number
            elif isinstance(report, Staged):
                self._staged.setdefault(report.number, {})[rank] = report.failure
            elif isinstance(report, Failed):
                self._failed.setdefault(report.step, {})[rank] = report.error
                self._failed_since.setdefault(report.step, time.monotonic())
            elif not self._failed or report.step < min(self._failed):  # else it follows from that
                self._comparer.compare(rank, report)

    def _look(self) -> None:
        """A step that failed on a follower leaves this rank in its collectives for ever, unless the
        step fails here too, which takes no longer than on the follower."""
        self._read_reports()
        for step, since in self._failed_since.items():
            if time.monotonic() - since > CONFIRMATION_TIMEOUT_S:
                self._raise_for(step)

    def _raise_for(self, step: int) -> None:
        rank, error = next(iter(self._failed[step].items()))
        raise RanksDisagree(
            f"step {step} failed on rank {rank} alone: {error}. The ranks of its model are out of "
            "step: start the job again."
        )

    def _confirm_failure(self, step: int, error: BaseException) -> None:
        """Wait until all ranks say that `step` failed.

        A step that failed only here leaves other ranks waiting in its collectives. Or the step
        failed because another rank died, which this rank learns a little later.
        """
        followers = set(self._channel.members[1:])
        deadline = time.monotonic() + CONFIRMATION_TIMEOUT_S
        while missing := followers - set(self._failed.get(step, ())):
            self._check_alive()
            if time.monotonic() > deadline:
                raise failed_alone(step, error, f"rank {', '.join(map(str, sorted(missing)))}")
            time.sleep(1e-3)
            self._read_reports()
        self._failed.pop(step, None)
        self._failed_since.pop(step, None)


def failed_alone(step: int, error: BaseException, others: str) -> RanksDisagree:
    """The error where a step failed here, and not on `others`."""
    found = RanksDisagree(
        f"step {step} failed on this rank ({error!r}), but not on {others}: the ranks of its model "
        "are out of step, start the job again."
    )
    found.__cause__ = error
    return found
