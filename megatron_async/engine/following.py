"""Follow a leader: repeat on this rank's engine what the leader's log says."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, Protocol

from megatron_async.engine.step_loop import StepLoop
from megatron_async.errors import RanksDisagree, RequestError
from megatron_async.interrupts import HeldInterrupts
from megatron_async.planning.step_output import StepOutput
from megatron_async.planning.step_plan import StepShape
from megatron_async.ranks.actions import (
    Abort,
    Action,
    Add,
    Close,
    Compile,
    Control,
    Import,
    Launch,
    Release,
    Resolve,
    Tell,
    Update,
)
from megatron_async.ranks.follower import Follower
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.step.text_generation_controller import LaunchedStep
from megatron_async.text.grammar_compiler import COMPILE_LIMIT_S, GrammarCompiler

PATIENCE = 10
"""Factor: a follower lets a grammar compile so many times as long as its leader does."""
METHODS = ("pause", "unpause", "suspend", "resume", "reset_prefix_cache")


class _Followed(Protocol):
    """The calls of an engine that a log repeats; `METHODS` too."""

    loop: StepLoop
    grammars: GrammarCompiler

    def launch_step(self) -> LaunchedStep | None: ...
    def launch_dummy_step(self) -> LaunchedStep | None: ...
    def resolve_step(self) -> list[StepOutput]: ...
    def report(self, start: float) -> dict[str, Any]: ...
    def abort_request(self, request_id: int) -> None: ...
    def add_request(
        self,
        request_id: int,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        traceparent: str = "",
    ) -> asyncio.Future[Any]: ...
    def import_request(self, request_id: int, data: dict[str, Any]) -> asyncio.Future[Any]: ...


def follow(engine: _Followed) -> bool:
    """Replay until the leader releases its followers or closes its engine.

    Returns:
        whether the leader goes on: False when it has closed its engine, or if the engine's own rank
        leads.

    Raises:
        RankLost: the leader died.
        RanksDisagree: an action had another result here than on the leader; or the leader gave up.
    """
    group = engine.loop.group
    if not isinstance(group, Follower):
        return False
    # What just compiled in time on the leader must not fail here.
    engine.grammars.limit_s = PATIENCE * COMPILE_LIMIT_S
    with engine.loop.giving_up():
        return _follow(engine, group)


def _follow(engine: _Followed, group: Follower) -> bool:
    in_flight = engine.loop.in_flight
    while True:
        start = time.perf_counter()
        action = group.receive(in_flight[0] if in_flight else None)
        with HeldInterrupts():  # an action is replayed as a whole, or not yet
            if not isinstance(action, Close | Release):
                _replay(engine, group, action)
            if isinstance(action, Resolve | Update):
                # Nobody reads the reports here, but traces and statistics go with them.
                engine.report(start)
            group.replayed()
        if isinstance(action, Close | Release):
            return isinstance(action, Release)


def _replay(engine: _Followed, group: Follower, action: Action) -> None:
    """Repeat an action of the leader."""
    if isinstance(action, Launch):
        _check_step("launches", action.step, engine.loop.context.next_step)
        group.shape = None if action.shape is None else StepShape(*action.shape)
        group.prefill_limit = action.prefill_limit
        if action.is_dummy:
            engine.launch_dummy_step()
        else:
            engine.launch_step()
    elif isinstance(action, Resolve):
        in_flight = engine.loop.in_flight
        _check_step("books", action.step, in_flight[0].plan.step if in_flight else None)
        engine.resolve_step()
    elif isinstance(action, Compile):
        with suppress(RequestError):  # the leader finds the same
            engine.grammars.begin(action.params.structured_output)
    elif isinstance(action, Add | Import):
        params = action.params if isinstance(action, Add) else action.moved.params
        if params.structured_output is not None:
            # Compiled since the leader began it, so this wait is short if it is one.
            wait([engine.grammars.begin(params.structured_output)])
        if isinstance(action, Add):
            future = engine.add_request(
                action.request_id, action.tokens, params, action.priority,
                traceparent=action.traceparent,
            )  # fmt: skip
        else:
            future = engine.import_request(action.request_id, action.moved.plain())
        if future.done():
            failed = future.result()
            raise RanksDisagree(
                f"request {action.request_id} is served by the leader, but here: "
                f"{getattr(failed, 'error', failed)}. Make model, tokenizer and configuration "
                "alike on all ranks."
            )
    elif isinstance(action, Abort):
        engine.abort_request(action.request_id)
    elif isinstance(action, Update):
        engine.loop.updating.replay(action)
    elif isinstance(action, Tell):
        group.told(action)
    elif isinstance(action, Control):
        assert action.method in METHODS, action.method
        getattr(engine, action.method)(*action.arguments)


def _check_step(verb: str, theirs: int, ours: int | None) -> None:
    if theirs != ours:
        raise RanksDisagree(
            f"the leader {verb} step {theirs}, but here that would be step {ours}: this rank's "
            "engine was used by others than its leader, or it is a bug."
        )
