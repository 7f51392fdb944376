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
from dataclasses import dataclass, field
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


Epochs = list[tuple[int, int]]


@dataclass(frozen=True)
class _Stamp:
    timestamp: float
    first_token: int
    epoch: int


@dataclass
class EpochStamps:
    """The stamps of one request."""

    _stamps: list[_Stamp] = field(default_factory=list)

    def stamp(self, timestamp: float, num_tokens: int, epoch: int) -> None:
        """The epoch changes, or the request comes, at `time.time()`, with so many known tokens of
        prompt and generation."""
        first = num_tokens - 1 if self._stamps else 0
        self._stamps.append(_Stamp(timestamp, first, epoch))

    def policy(self) -> Epochs | None:
        """`policy_epoch`; None where no epoch was ever told."""
        if not self._stamps:
            return None
        return [(stamp.first_token, stamp.epoch) for stamp in self._stamps]

    def kv_cache(self, request: DynamicInferenceRequest) -> Epochs | None:
        """`kv_cache_epoch` of the request with these stamps."""
        if not self._stamps:
            return None
        kinds = [event.type for event in request.events]
        evictions = [i for i, k in enumerate(kinds) if k is OwnType.EVICT]
        if not evictions:
            return self.policy()
        # Keys and values are those of the weights that were there when it was admitted again; while
        # it waits, of those that are there now.
        behind = request.events[evictions[-1] + 1 :]
        admissions = (e for e in behind if e.type is OwnType.ADD_CONTEXT)
        again = next((event.timestamp for event in admissions), float("inf"))
        before = [stamp for stamp in self._stamps if stamp.timestamp <= again]
        after = self._stamps[len(before) :]
        first = before[-1].epoch if before else after[0].epoch
        return [(0, first), *((stamp.first_token, stamp.epoch) for stamp in after)]
