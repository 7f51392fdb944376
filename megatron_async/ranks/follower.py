"""`Follower`: a rank without callers, which replays its leader's log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from megatron_async.contexts.step_plan import StepPlan
from megatron_async.contexts.step_shape import StepShape
from megatron_async.errors import CommunicationTimeout, RanksDisagree, RequestError
from megatron_async.interrupts import HeldInterrupts
from megatron_async.ranks.actions import (
    Abort,
    Action,
    Add,
    Close,
    Compile,
    Control,
    Digests,
    Failed,
    Launch,
    Release,
    Resolve,
    Tell,
    Told,
)
from megatron_async.ranks.plan_digest import plan_digest, sample_digest
from megatron_async.ranks.rank_group import WATCH_EVERY_S, Channel, ConnectedGroup
from megatron_async.text.grammar_compiler import COMPILE_LIMIT_S
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep

if TYPE_CHECKING:
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine

PATIENCE = 10
"""Factor: a follower lets a grammar compile so many times as long as its leader does."""
IDLE_S = 0.5
"""Seconds within which a follower that waits for its leader heeds Ctrl-C."""
METHODS = ("pause", "unpause", "suspend", "resume", "reset_prefix_cache")


class Follower(ConnectedGroup):
    """A rank that replays its leader's log.

    Args:
        channel: to the leader.
        check_alive: raises RankLost if a rank died that steps need.
        check_agreement: report digests of plans and samples.

    Attributes:
        shape: shape of the step that is planned next, if the leader agreed on it with other ranks.
        prefill_limit: most prompt tokens of that step beside decode rows.
        on_told: called with the leader's news of the service, on the thread that follows; None:
            nobody here wants them.
    """

    def __init__(
        self, channel: Channel, check_alive: Callable[[], None], check_agreement: bool = False
    ) -> None:
        super().__init__(channel, check_alive, check_agreement)
        self.shape: StepShape | None = None
        self.prefill_limit = 0
        self.on_told: Callable[[str, Any], None] | None = None
        self._received: deque[Action] = deque()
        self._reported = -1

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
            if self._fetch(WATCH_EVERY_S if oldest else IDLE_S):
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

    def told(self, news: Tell) -> None:
        """Take in the leader's news of the service, and report that."""
        if self.on_told is not None:
            self.on_told(news.what, news.value)
        self._channel.report(Told(news.number))

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


def follow(engine: DynamicInferenceEngine) -> bool:
    """Replay until the leader releases its followers or closes its engine.

    Returns:
        whether the leader goes on: False when it has closed its engine, or if the engine's own rank
        leads.

    Raises:
        RankLost: the leader died.
        RanksDisagree: an action had another result here than on the leader; or the leader gave up.
    """
    if not isinstance(engine.group, Follower):
        return False
    # What just compiled in time on the leader must not fail here.
    engine.grammars.limit_s = PATIENCE * COMPILE_LIMIT_S
    with engine.job.giving_up(engine.group):
        return _follow(engine, engine.group)


def _follow(engine: DynamicInferenceEngine, group: Follower) -> bool:
    while True:
        start = time.perf_counter()
        action = group.receive(engine.in_flight[0] if engine.in_flight else None)
        with HeldInterrupts():  # an action is replayed as a whole, or not yet
            if not isinstance(action, Close | Release):
                _replay(engine, group, action)
            if isinstance(action, Resolve):
                # Nobody reads the reports here, but traces and statistics go with them.
                engine.report(start)
            group.replayed()
        if isinstance(action, Close | Release):
            return isinstance(action, Release)


def _replay(engine: DynamicInferenceEngine, group: Follower, action: Action) -> None:
    """Repeat an action of the leader."""
    if isinstance(action, Launch):
        _check_step("launches", action.step, engine.context.next_step)
        group.shape = None if action.shape is None else StepShape(*action.shape)
        group.prefill_limit = action.prefill_limit
        if action.is_dummy:
            engine.launch_dummy_step()
        else:
            engine.launch_step()
    elif isinstance(action, Resolve):
        in_flight = engine.in_flight[0].plan.step if engine.in_flight else None
        _check_step("books", action.step, in_flight)
        engine.resolve_step()
    elif isinstance(action, Compile):
        with suppress(RequestError):  # the leader finds the same
            engine.grammars.begin(action.params.structured_output)
    elif isinstance(action, Add):
        if action.params.structured_output is not None:
            # Compiled since the leader began it, so this wait is short if it is one.
            wait([engine.grammars.begin(action.params.structured_output)])
        future = engine.add_request(
            action.request_id, action.tokens, action.params, action.priority,
            traceparent=action.traceparent,
        )  # fmt: skip
        if future.done():
            failed = future.result()
            raise RanksDisagree(
                f"request {action.request_id} is served by the leader, but here: "
                f"{getattr(failed, 'error', failed)}. Make model, tokenizer and configuration "
                "alike on all ranks."
            )
    elif isinstance(action, Abort):
        engine.abort_request(action.request_id)
    elif isinstance(action, Tell):
        group.told(action)
    elif isinstance(action, Control):
        assert action.method in METHODS, action.method
        arguments = () if action.argument is None else (action.argument,)
        getattr(engine, action.method)(*arguments)


def _check_step(verb: str, theirs: int, ours: int | None) -> None:
    if theirs != ours:
        raise RanksDisagree(
            f"the leader {verb} step {theirs}, but here that would be step {ours}: this rank's "
            "engine was used by others than its leader, or it is a bug."
        )
