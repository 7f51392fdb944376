"""From the events of our requests to Megatron's, when their tokens were reported, and which
generation of weights made which part of a request, for reinforcement learning.

Megatron's requests carry two sparse lists of (first token, epoch): `policy_epoch`, of the weights
that chose the tokens, and `kv_cache_epoch`, of the weights that the keys and values are of. The
first is stamped whenever the epoch changes; the second begins anew when a request is evicted, since
all of its keys and values are then computed again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.inference.contexts.dynamic_context import ContextOverflowError
from megatron.core.inference.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
)
from numpy.typing import NDArray

from megatron_async.planning.step_output import StepOutput
from megatron_async.requests.inference_request import DynamicInferenceEvent as OwnEvent
from megatron_async.requests.inference_request import DynamicInferenceEventType as OwnType
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.weight_versions import Marks

Payload = dict[str, Any]


@dataclass(frozen=True)
class TokenEvent:
    """One generated token; the payload is Megatron's."""

    timestamp: float
    """`time.time()` of the report that carried the token."""
    payload: Payload


@dataclass(frozen=True)
class _Report:
    number: int
    timestamp: float
    request_ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    facts: Payload


class TokenTimes:
    """A log of reports: a few arrays a step, looked through when a request ends."""

    def __init__(self) -> None:
        self._reports: deque[_Report] = deque()
        self.number = 0
        """Number of the next report."""

    def add(self, output: StepOutput, facts: Payload) -> None:
        """Note a step's tokens; `facts` are what the payload says of each of them beside its id."""
        counts = np.bincount(output.rows, minlength=len(output.request_ids))
        report = _Report(self.number, time.time(), output.request_ids, counts, facts)
        self._reports.append(report)
        self.number += 1

    def events_of(self, request_id: int, tokens: list[int], since: int) -> list[TokenEvent]:
        """The events of all generated tokens of a request, which came when `number` was `since`;
        what no report has told yet is told now."""
        events: list[TokenEvent] = []
        for report in self._reports:
            if report.number >= since:
                places = np.flatnonzero(report.request_ids == request_id)
                for _ in range(int(report.counts[places].sum())):
                    if len(events) < len(tokens):
                        payload = {"token_id": tokens[len(events)], **report.facts}
                        events.append(TokenEvent(report.timestamp, payload))
        now, facts = time.time(), self._reports[-1].facts if self._reports else {}
        missing = tokens[len(events) :]
        return events + [TokenEvent(now, {"token_id": token, **facts}) for token in missing]

    def forget_before(self, number: int) -> None:
        """Drop the reports that no unfinished request needs."""
        while self._reports and self._reports[0].number < number:
            self._reports.popleft()


def to_events(
    events: Sequence[OwnEvent],
    tokens: Sequence[TokenEvent] = (),
    error: ContextOverflowError | None = None,
    *,
    with_pauses: bool,
) -> list[DynamicInferenceEvent]:
    """A request's life in Megatron's events, in the order of their times: of our request, of its
    generated tokens where these are tracked, and the error before its FAIL; pauses where they are
    kept (`track_paused_request_events`)."""
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


Epochs = list[tuple[int, Any]]


def to_epochs(request: DynamicInferenceRequest) -> tuple[Epochs | None, Epochs | None]:
    """`policy_epoch` and `kv_cache_epoch` of a request; None where no epoch was ever told."""
    weights, prompt = request.weights, len(request.prompt_tokens)
    # Megatron counts from the position whose logits a token comes from.
    tokens = [(max(prompt + first - 1, 0) if first else 0, told) for first, told in weights.tokens]
    policy = _told(tokens)
    return policy, _told(weights.cache) or policy


def _told(marks: Marks) -> Epochs | None:
    told: Epochs = [mark for mark in marks if mark[1] is not None]
    return [(0, told[0][1]), *told[1:]] if told else None
