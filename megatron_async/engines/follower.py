"""Replay a leader's log on an engine: the loop of a rank that has no callers of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from megatron_async.engines.actions import (
    Abort,
    Action,
    Add,
    Close,
    Control,
    Launch,
    Release,
    Resolve,
)
from megatron_async.engines.rank_group import Follower
from megatron_async.errors import RanksDisagree

if TYPE_CHECKING:
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine

METHODS = ("pause", "unpause", "suspend", "resume")


def follow(engine: DynamicInferenceEngine, group: Follower) -> bool:
    """Replay until the leader releases its followers or closes its engine.

    Returns:
        whether the leader goes on: False when it has closed its engine.

    Raises:
        RankLost: the leader died.
        RanksDisagree: an action did here what it did not do there; or the leader gave up.
    """
    while True:
        start = time.perf_counter()
        action = group.receive(engine.in_flight[0] if engine.in_flight else None)
        if isinstance(action, Close | Release):
            return isinstance(action, Release)
        _replay(engine, action)
        if isinstance(action, Resolve):
            # Nobody reads the reports here, but traces and statistics go with them.
            engine._report([], start)


def _replay(engine: DynamicInferenceEngine, action: Action) -> None:
    """Do what the leader did."""
    if isinstance(action, Launch):
        _check_step("launches", action.step, engine.context.next_step)
        engine._launch_next()
    elif isinstance(action, Resolve):
        in_flight = engine.in_flight[0].plan.step if engine.in_flight else None
        _check_step("books", action.step, in_flight)
        engine._wait(engine.in_flight[0])
        engine._resolve_oldest()
    elif isinstance(action, Add):
        future = engine.add_request(
            action.request_id, action.tokens, action.params, action.priority
        )
        if future.done():
            raise RanksDisagree(
                f"request {action.request_id} is served by the leader, but here: "
                f"{future.result().error}. Make model, tokenizer and configuration alike on all "
                "ranks."
            )
    elif isinstance(action, Abort):
        engine.abort_request(action.request_id)
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
