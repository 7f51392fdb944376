"""The ranks of one model, as the interface that their engines call.

`RankGroup` itself is for a model on one rank. A `Leader` has the requests and logs its actions; a
`Follower` replays the log. An engine calls the same methods on each of the three.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, override

from megatron_async.devices import Event
from megatron_async.errors import JobFailed
from megatron_async.planning.step_plan import StepPlan, StepShape
from megatron_async.ranks.actions import Report, Turn, Update
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.step.text_generation_controller import LaunchedStep

WATCH_EVERY_S = 0.05
"""Seconds between two checks whether the other ranks are alive, during a wait for the device."""
LOSS_TIMEOUT_S = 5.0
"""Seconds after a rank's death within which the others know of it."""
LOOK_AGAIN_S = 0.01
"""Seconds between two looks whether they know of one."""


class Channel(Protocol):
    """The methods of `communication.channel.StepChannel` that a group uses."""

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
        """On the leader: messages since the last call, with the ranks that sent them."""
        ...

    def close(self) -> None:
        """Say goodbye."""
        ...


class RankGroup:
    """A model on one rank: no other rank to inform or to wait for."""

    is_alone = True
    """Whether no other rank follows what this one does."""
    follows = False
    """Whether this rank repeats what another one does."""
    agrees = False
    """Whether `agree` is a round with ranks that have other requests."""
    agreement_ns = 0
    """Nanoseconds spent in `agree` so far."""
    vote = 0
    """For `agree`: minus the newest round of weights that this rank may commit, or the number of
    one that has failed here."""
    agreed = 0
    """The largest `vote` of all ranks at the last `agree`."""
    others_work = False
    """Whether a rank with other requests had unfinished ones at the last agreement."""
    must_keep_up = False
    """Whether ranks with other requests have not stopped yet, and need this one's experts."""

    def check_leads(self) -> None:
        """Raise RanksDisagree if this rank is a follower, which takes no calls."""

    def check_alive(self) -> None:
        """Raise RankLost if a rank died that steps need; cheap."""

    def compiling(self, request: DynamicInferenceRequest) -> None:
        """A request's grammar is being compiled; it is queued when that is done."""

    def added(self, request: DynamicInferenceRequest) -> None:
        """A servable request was queued."""

    def aborted(self, request_id: int) -> None:
        """An unfinished request was aborted."""

    def controlled(self, method: str, *arguments: Any) -> None:
        """A method that stops the engine or lets it continue is about to act; the steps in flight
        are booked."""

    def launching(self, step: int, prefill_limit: int) -> int:
        """A step is planned next.

        Args:
            step: its number.
            prefill_limit: `Scheduler.prefill_limit` by this rank's own clock.

        Returns:
            the leader's limit, with which to plan the step.
        """
        return prefill_limit

    def agree(self, step: int, wanted: StepShape, has_work: bool) -> StepShape:
        """Agree on the shape of a step with ranks that have other requests.

        Args:
            step: its number.
            wanted: shape of the rows that this rank has scheduled; empty if it has none.
            has_work: whether this rank has an unfinished request.

        Raises:
            CommunicationTimeout, RankLost: a rank did not take part.
        """
        return wanted

    @property
    def others_wait(self) -> bool:
        """Whether a rank with other requests waits for this one to agree on a step."""
        return False

    def begin_together(self) -> None:
        """All ranks, this one too, are about to start work."""

    def stop_together(self, is_stopping: bool) -> None:
        """The engine of this rank stops, or continues; the engines of its group must do so too."""

    async def wait_for_work(self, requests: RequestRegistry) -> None:
        """Wait until there is a request, or another rank has work.

        Raises:
            RankLost: a rank that shares experts has died.
        """
        await requests.wait_for_one()

    def planned(self, plan: StepPlan) -> None:
        """A step has been planned."""

    def launch_failed(self, step: int, error: BaseException) -> None:
        """A step could not be launched on this rank; it counts as a step that failed."""

    def wait(self, event: Event) -> None:
        """Wait for the device.

        Raises:
            RanksDisagree: other ranks have given up.
            RankLost: a rank has died.
        """
        event.wait()

    async def wait_async(self, event: Event) -> None:
        """`wait` while other coroutines run: a thread waits for the event, and for nothing else."""
        await asyncio.to_thread(event.wait)

    def resolving(self, step: LaunchedStep) -> None:
        """The oldest step is booked next; its samples are there.

        Raises:
            RanksDisagree: the step failed on some ranks only, or plans or samples of ranks differ.
        """

    def staged(self, number: int, failure: str) -> None:
        """This rank has a round of weights ready, or cannot have it. On any thread."""

    def staged_by_all(self, number: int) -> tuple[bool, str]:
        """Whether all followers have a round of weights ready, and why one of them cannot."""
        return True, ""

    def updating(self, update: Update) -> None:
        """A round of weights is committed before the next plan, or dropped."""

    def tell(self, what: str, value: Any = None) -> None:
        """Give followers news of the service, in order with all actions."""

    async def until_told(self) -> None:
        """Wait until all followers have taken in what `tell` gave them.

        Raises:
            RanksDisagree: a follower has given up.
            RankLost: a rank has died.
        """

    def release(self) -> None:
        """The leader's `generate`, or its service, ends, so `follow` returns on followers."""

    def close(self, error: BaseException | None = None) -> None:
        """The engine is closed, or gives up for `error`."""


class ConnectedGroup(RankGroup):
    """A rank with a channel to the other ranks of its model."""

    is_alone = False

    def __init__(
        self, channel: Channel, check_alive: Callable[[], None], check_agreement: bool
    ) -> None:
        self._channel = channel
        self._check_alive = check_alive
        self._checks = check_agreement

    @override
    def check_alive(self) -> None:
        self._check_alive()

    @override
    def wait(self, event: Event) -> None:
        try:
            while not event.wait_for(WATCH_EVERY_S):
                self._check_alive()
                self._look()
        except JobFailed:
            raise
        except Exception:
            for _ in self._looks_for_the_dead():
                time.sleep(LOOK_AGAIN_S)
            raise

    @override
    async def wait_async(self, event: Event) -> None:
        try:
            while not await asyncio.to_thread(event.wait_for, WATCH_EVERY_S):
                # Not in the thread: meanwhile the loop may send to the same ranks and hear them.
                self._check_alive()
                self._look()
        except JobFailed:
            raise
        except Exception:
            for _ in self._looks_for_the_dead():
                await asyncio.sleep(LOOK_AGAIN_S)
            raise

    def _looks_for_the_dead(self) -> Iterator[None]:
        """A stream broke: if that is because a rank died, it is known a little later, and raised
        here."""
        deadline = time.monotonic() + LOSS_TIMEOUT_S
        while time.monotonic() < deadline:
            self._check_alive()
            yield

    @abstractmethod
    def _look(self) -> None:
        """Read what the other ranks have sent; raises if one has given up."""
