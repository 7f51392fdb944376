"""The ranks that hold one model between them, as their engine sees them.

`RankGroup` itself is a rank alone. A `Leader` owns the requests and logs what it does to them; a
`Follower` replays that log (`engines/follower.py`). An engine calls the same methods on each and
does not know which it has.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from megatron_async.contexts.step_plan import StepPlan
from megatron_async.devices import Event
from megatron_async.engines.actions import (
    Abort,
    Action,
    Add,
    Close,
    Control,
    Digests,
    Failed,
    Launch,
    Release,
    Report,
    Resolve,
    Turn,
)
from megatron_async.engines.plan_digest import PlanComparer, plan_digest, sample_digest
from megatron_async.errors import CommunicationTimeout, RanksDisagree
from megatron_async.inference_request import DynamicInferenceRequest
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep

CONFIRMATION_TIMEOUT_S = 5.0
"""Ranks launch a step together, so what fails on all of them fails within a step's time."""
WATCH_EVERY_S = 0.05
"""Who waits for the device looks so often whether the other ranks are alive."""


class Channel(Protocol):
    """What a group needs of `communication.channel.StepChannel`."""

    members: Sequence[int]

    def send(self, message: Turn) -> None:
        """Leader to followers; never blocks."""
        ...

    def receive(self, timeout_s: float | None = None) -> Turn:
        """On a follower: the leader's next message."""
        ...

    def report(self, message: Report) -> None:
        """Follower to leader; never blocks."""
        ...

    def reports(self) -> list[tuple[int, Report]]:
        """On the leader: what came in since, with who sent it."""
        ...

    def check(self) -> None:
        """Raise RankLost if a member has died."""
        ...

    def close(self) -> None:
        """Say goodbye."""
        ...


class RankGroup:
    """A rank alone: nobody to tell, nobody to wait for."""

    is_leader = True

    def added(self, request: DynamicInferenceRequest) -> None:
        """A servable request was queued."""

    def aborted(self, request_id: int) -> None:
        """An unfinished request was aborted."""

    def controlled(self, method: str, argument: bool | None = None) -> None:
        """A method that stops the engine or lets it go on is about to change it; the steps in
        flight are booked."""

    def launching(self, step: int) -> None:
        """A step is planned next."""

    def planned(self, plan: StepPlan) -> None:
        """It has been."""

    def launch_failed(self, step: int, error: BaseException) -> None:
        """It could not be launched here; it counts as a step that failed."""

    def wait(self, event: Event) -> None:
        """Wait for the device.

        Raises:
            RanksDisagree: other ranks have given up.
            RankLost: one has died.
        """
        event.wait()

    def resolving(self, step: LaunchedStep) -> None:
        """The oldest step is booked next; its samples are there.

        Raises:
            RanksDisagree: it failed on some ranks and not on others, or they planned or sampled
                something else.
        """

    def release(self) -> None:
        """The caller of `generate` gets its answers: followers return to theirs."""

    def close(self, error: BaseException | None = None) -> None:
        """The engine is closed, or gives up for `error`."""


class _ConnectedGroup(RankGroup):
    def __init__(self, channel: Channel, check_agreement: bool) -> None:
        self._channel = channel
        self._checks = check_agreement

    def wait(self, event: Event) -> None:
        while not event.wait_for(WATCH_EVERY_S):
            self._channel.check()
            self._look()

    @abstractmethod
    def _look(self) -> None:
        """Read what the other ranks have sent; raises if one has given up."""


class Leader(_ConnectedGroup):
    """The rank whose callers add requests.

    Args:
        channel: to the followers.
        check_agreement: compare the digests that followers report.
    """

    def __init__(self, channel: Channel, check_agreement: bool = False) -> None:
        super().__init__(channel, check_agreement)
        self._pending: list[Action] = []
        self._comparer = PlanComparer()
        self._failed: dict[int, dict[int, str]] = {}
        """Step -> follower -> error, of steps that failed there and are not yet booked here."""
        self._failed_since: dict[int, float] = {}
        self._is_closed = False

    def added(self, request: DynamicInferenceRequest) -> None:
        tokens = request.prompt_tokens.astype("int32").tobytes()
        params = request.sampling_params
        self._pending.append(Add(request.request_id, tokens, params, request.priority))

    def aborted(self, request_id: int) -> None:
        self._pending.append(Abort(request_id))

    def controlled(self, method: str, argument: bool | None = None) -> None:
        self._send(Control(method, argument))

    def launching(self, step: int) -> None:
        self._send(Launch(step))

    def planned(self, plan: StepPlan) -> None:
        if self._checks:
            self._comparer.expect(plan.step, plan_digest(plan))

    def resolving(self, step: LaunchedStep) -> None:
        number, error = step.plan.step, step.error
        self._send(Resolve(number))
        if self._checks and error is None:
            self._comparer.expect(number, sample_digest(step))
        self._read_reports()
        if error is not None:
            self._confirm_failure(number, error)
        elif early := [failed for failed in self._failed if failed <= number]:
            self._raise_for(min(early))

    def release(self) -> None:
        self._send(Release())

    def close(self, error: BaseException | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._send(Close(None if error is None else repr(error)))
        self._channel.close()

    def _send(self, action: Action) -> None:
        pending, self._pending = [*self._pending, action], []
        self._channel.send(Turn(pending))

    def _read_reports(self) -> None:
        for rank, report in self._channel.reports():
            if isinstance(report, Failed):
                self._failed.setdefault(report.step, {})[rank] = report.error
                self._failed_since.setdefault(report.step, time.monotonic())
            else:
                self._comparer.compare(rank, report)

    def _look(self) -> None:
        """A step that failed on a follower keeps this rank waiting in its collectives for ever,
        unless it fails here too; which takes no longer than there."""
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
        """It failed here: it must have failed everywhere, or others wait in its collectives."""
        followers = set(self._channel.members[1:])
        deadline = time.monotonic() + CONFIRMATION_TIMEOUT_S
        while missing := followers - set(self._failed.get(step, ())):
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, sorted(missing)))
                raise RanksDisagree(
                    f"step {step} failed on this rank ({error!r}), but not on rank {ranks}: the "
                    "ranks of its model are out of step, start the job again."
                ) from error
            self._channel.check()
            time.sleep(1e-3)
            self._read_reports()
        self._failed.pop(step, None)
        self._failed_since.pop(step, None)


class Follower(_ConnectedGroup):
    """A rank that replays its leader's log.

    Args:
        channel: to the leader.
        check_agreement: report digests of plans and samples.
    """

    is_leader = False

    def __init__(self, channel: Channel, check_agreement: bool = False) -> None:
        super().__init__(channel, check_agreement)
        self._received: deque[Action] = deque()
        self._reported = -1

    @property
    def leader(self) -> int:
        """Its rank in the job."""
        return self._channel.members[0]

    def receive(self, oldest: LaunchedStep | None) -> Action:
        """The leader's next action.

        Args:
            oldest: of the steps in flight. If it fails on this rank, the leader is told, who may be
                waiting for this rank in it.

        Raises:
            RankLost: the leader died.
            RanksDisagree: it gave up.
        """
        while not self._received:
            if self._fetch(WATCH_EVERY_S if oldest else None):
                continue
            if oldest is not None and oldest.ready.query() and oldest.error is not None:
                self.launch_failed(oldest.plan.step, oldest.error)
        return self._received.popleft()

    def planned(self, plan: StepPlan) -> None:
        if self._checks:
            self._channel.report(Digests(plan.step, plan_digest(plan)))

    def launch_failed(self, step: int, error: BaseException) -> None:
        if step > self._reported:
            self._reported = step
            self._channel.report(Failed(step, repr(error)))

    def resolving(self, step: LaunchedStep) -> None:
        if step.error is not None:
            self.launch_failed(step.plan.step, step.error)
        elif self._checks:
            self._channel.report(Digests(step.plan.step, sample_digest(step)))

    def close(self, error: BaseException | None = None) -> None:
        self._channel.close()

    def _look(self) -> None:
        while self._fetch(0.0):
            pass

    def _fetch(self, timeout_s: float | None) -> bool:
        """Take in one message; whether one came in time."""
        try:
            turn = self._channel.receive(timeout_s)
        except CommunicationTimeout:
            return False
        for action in turn.actions:
            if isinstance(action, Close) and action.error is not None:
                raise RanksDisagree(f"rank {self.leader}, which leads, gave up: {action.error}")
        self._received += turn.actions
        return True
