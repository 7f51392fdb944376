"""From the events of our requests to Megatron's."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.inference.contexts.dynamic_context import ContextOverflowError
from megatron.core.inference.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
)

from megatron_async.compat.conversions.token_times import TokenEvent
from megatron_async.requests.inference_request import DynamicInferenceEvent as OwnEvent
from megatron_async.requests.inference_request import DynamicInferenceEventType as OwnType


def to_events(
    events: Sequence[OwnEvent],
    tokens: Sequence[TokenEvent] = (),
    error: ContextOverflowError | None = None,
    *,
    with_pauses: bool,
) -> list[DynamicInferenceEvent]:
    """A request's life in Megatron's events, in the order of their times.

    Args:
        events: of our request.
        tokens: of its generated tokens, where they are tracked.
        error: why it failed; goes before the FAIL.
        with_pauses: keep the pauses (`track_paused_request_events`).
    """
    found = [
        DynamicInferenceEvent(
            type=DynamicInferenceEventType.GENERATED_TOKEN,
            timestamp=token.timestamp,
            payload=token.payload,
        )
        for token in tokens
    ]
    for event in events:
        if event.type is OwnType.PAUSE and not with_pauses:
            continue
        if event.type is OwnType.FAIL and error is not None:
            kind = DynamicInferenceEventType.ERROR_NONTRANSIENT
            found.append(DynamicInferenceEvent(type=kind, timestamp=event.timestamp, payload=error))
        kind = DynamicInferenceEventType[event.type.name]
        found.append(DynamicInferenceEvent(type=kind, timestamp=event.timestamp))
    ends = (OwnType.FINISH.name, OwnType.FAIL.name)
    # Tokens of the last step are told with the end, so at equal times the end is last.
    return sorted(found, key=lambda event: (event.type.name in ends, event.timestamp))
