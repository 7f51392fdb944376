"""`Follower`: the group of a rank without callers, which receives its leader's log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from megatron_async.errors import CommunicationTimeout, RanksDisagree
from megatron_async.interrupts import HeldInterrupts
from megatron_async.planning.step_plan import StepPlan, StepShape
from megatron_async.ranks.actions import (
    Action,
    Close,
    Digests,
    Failed,
    Staged,
    Tell,
    Told,
)
from megatron_async.ranks.plan_digest import plan_digest, sample_digest
from megatron_async.ranks.rank_group import WATCH_EVERY_S, Channel, ConnectedGroup
from megatron_async.step.text_generation_controller import LaunchedStep


class Follower(ConnectedGroup):
    """A rank that replays its leader's log; every `WATCH_EVERY_S` it heeds Ctrl-C and other threads
    of its process.

    Args:
        channel: to the leader.
        check_alive: raises RankLost if a rank died that steps need.
        check_agreement: report digests of plans and samples.

    Attributes:
        shape: shape of the step that is planned next, if the leader agreed on it with other ranks.
        prefill_limit: most prompt tokens of that step beside decode rows.
        on_told: called with the leader's news of the service, on the thread that follows; what it
            returns, if anything, is the work of another thread, without which the news do not count
            as taken in. None: nobody here wants them.
    """

    def __init__(
        self, channel: Channel, check_alive: Callable[[], None], check_agreement: bool = False
    ) -> None:
        super().__init__(channel, check_alive, check_agreement)
        self.follows = True
        self.shape: StepShape | None = None
        self.prefill_limit = 0
        self.on_told: Callable[[str, Any], Future[Any] | None] | None = None
        self._tells: deque[tuple[int, Future[Any] | None]] = deque()
        """Numbers of news, oldest first, that are not reported, and the work that they wait for."""
        self._received: deque[Action] = deque()
        self._reported = -1
        self._stages: deque[Staged] = deque()
        """Reports of other threads."""

    @property
    def leader(self) -> int:
        """The leader's rank in the job."""
        return self._channel.members[0]

    def check_leads(self) -> None:
        raise RanksDisagree(
            f"this rank does what rank {self.leader} does and steps by no other's will: call "
            "generate or follow of its LLM (or follow of its engine) here, and the rest on rank "
            f"{self.leader} alone."
        )

    @property
    def members(self) -> Sequence[int]:
        """Ranks of the model in the job, the leader first."""
        return self._channel.members

    def receive(self, oldest: LaunchedStep | None) -> Action:
        """The leader's next action, which stays the next one until `replayed` is called.

        Args:
            oldest: the oldest step in flight. If it fails on this rank, the leader is informed,
                because the leader may wait for this rank inside the step.

        Raises:
            RankLost: the leader died.
            RanksDisagree: it gave up.
        """
        while not self._received:
            while self._stages:
                self._channel.report(self._stages.popleft())
            self._report_told()
            if self._fetch(WATCH_EVERY_S):
                continue
            if oldest is not None and oldest.ready.query() and oldest.error is not None:
                self.launch_failed(oldest.plan.step, oldest.error)
        return self._received[0]

    def replayed(self) -> None:
        """What `receive` has returned is done."""
        self._received.popleft()

    def launching(self, step: int, prefill_limit: int) -> int:
        return self.prefill_limit

    def agree(self, step: int, wanted: StepShape, has_work: bool) -> StepShape:
        return wanted if self.shape is None else self.shape

    def planned(self, plan: StepPlan) -> None:
        if self._checks:
            self._channel.report(Digests(plan.step, plan_digest(plan)))

    def launch_failed(self, step: int, error: BaseException) -> None:
        if step > self._reported:
            self._reported = step
            self._channel.report(Failed(step, repr(error)))

    def staged(self, number: int, failure: str) -> None:
        self._stages.append(Staged(number, failure))  # `receive` reports it, on its own thread

    def told(self, news: Tell) -> None:
        """Take in the leader's news of the service, and report that."""
        work = None if self.on_told is None else self.on_told(news.what, news.value)
        self._tells.append((news.number, work))
        self._report_told()

    def _report_told(self) -> None:
        while self._tells and ((work := self._tells[0][1]) is None or work.done()):
            self._channel.report(Told(self._tells.popleft()[0]))

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

    def _fetch(self, timeout_s: float) -> bool:
        """Receive one message; returns whether one came in time. Ctrl-C loses none."""
        with HeldInterrupts():
            try:
                turn = self._channel.receive(timeout_s)
            except CommunicationTimeout:
                return False
            for action in turn.actions:
                if isinstance(action, Close) and action.error is not None:
                    raise RanksDisagree(f"rank {self.leader}, which leads, gave up: {action.error}")
            self._received += turn.actions
            return True
