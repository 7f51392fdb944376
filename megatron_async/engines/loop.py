"""Parts of an engine's loop: which steps are due, the end of a turn, and the loop of a task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
    from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep


def num_due(engine: DynamicInferenceEngine, launched: LaunchedStep | None) -> int:
    """How many of the oldest steps in flight are due to be resolved, after `launch_step` has
    returned `launched`."""
    in_flight = len(engine.in_flight)
    if engine.pausing.is_closed:
        return 0
    if engine.is_stopped or engine.invalidation.is_draining:
        return in_flight
    at_least = min(in_flight, 1) if launched is None else 0  # or nothing changes
    return max(in_flight - engine.lookahead, at_least)


def end_turn(engine: DynamicInferenceEngine, start: float) -> dict[str, Any]:
    """`DynamicInferenceEngine.report`. If Ctrl-C takes effect at its end, the next report has what
    this one had."""
    report = None
    try:
        with engine.turn:
            report = engine.report(start)
    except BaseException:
        if report is not None:
            engine.take_back(report)
        raise
    return report


async def run(engine: DynamicInferenceEngine) -> None:
    """Step whenever there is work, an earlier run's too, until the engine is closed."""
    while not engine.pausing.is_closed:
        while engine.has_unfinished_requests() and not engine.pausing.is_closed:
            await engine.async_step()
            await asyncio.sleep(0)  # a step whose samples are there already never waits
        if not engine.pausing.is_closed:
            with engine.job.giving_up(engine.group):
                await engine.group.wait_for_work(engine.requests)
