"""Mend an engine's books after something has cut a turn short (`turn.Turn`).

The books of the schedule (slots, blocks, plans, the prefix cache) all follow from the unfinished
requests and their known tokens. So whatever state they are in, they are thrown away and written
anew, as after an eviction of everybody. What is known of requests is written in an order that tells
how far it came: see `StepBooking` and `RequestRegistry.end`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from megatron_async.engines.turn import Turn
from megatron_async.errors import JobFailed, RanksDisagree
from megatron_async.ranks.rank_group import RankGroup

if TYPE_CHECKING:
    from megatron_async.devices import Device
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine


def turn_of(engine: DynamicInferenceEngine) -> Turn:
    """The `Turn` of an engine that is being made. It does not keep the engine alive."""
    reference = weakref.ref(engine)

    def mend_it(error: BaseException) -> None:
        if (found := reference()) is not None:
            mend(found, error)

    return Turn(mend_it)


def mend(engine: DynamicInferenceEngine, error: BaseException) -> None:
    """Make the books whole. Requests of a step whose tokens were just being booked fail with
    `error`; all others are prefilled again, to the same tokens. May be called again if it raises.

    With other ranks, which did what this rank did not, the engine gives up instead.
    """
    if engine.pausing.is_closed or engine.job.is_lost:
        return
    context, requests = engine.context, engine.requests
    if not engine.group.is_alone:
        _give_up(engine, engine.group, error)
        return
    _wait_for(context.device)  # before its rings and slots are used again
    engine.in_flight.clear()
    engine.invalidation.forget()
    engine.booking.mend(error)
    engine.admission.mend()
    context.start_again(
        [each for each in requests.unfinished() if not engine.admission.compiles(each.request_id)]
    )
    requests.readers.wake_all()
    requests.wake()
    for listener in engine.listeners:
        listener.mended(error)


def _wait_for(device: Device) -> None:
    """Until all that is launched is done."""
    done = device.event()
    for stream in (device.upload, device.compute, device.copy):
        stream.record(done)
        done.wait()


def _give_up(engine: DynamicInferenceEngine, group: RankGroup, error: BaseException) -> None:
    try:
        with engine.job.giving_up(group):
            raise RanksDisagree(
                f"{error!r} has cut this rank short in the middle of an action, which other ranks "
                "of its model may have done: start the job again."
            ) from error
    except JobFailed:
        if isinstance(error, Exception):
            raise
