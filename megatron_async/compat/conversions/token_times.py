"""When tokens of requests were reported, for `track_generated_token_events`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.contexts.step_output import StepOutput

Payload = dict[str, Any]


@dataclass(frozen=True)
class TokenEvent:
    """One generated token; the payload is that of Megatron's event."""

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
        """Note a step's tokens.

        Args:
            output: of the step.
            facts: what the payload says of each of them beside its id.
        """
        counts = np.bincount(output.rows, minlength=len(output.request_ids))
        report = _Report(self.number, time.time(), output.request_ids, counts, facts)
        self._reports.append(report)
        self.number += 1

    def events_of(self, request_id: int, tokens: list[int], since: int) -> list[TokenEvent]:
        """The events of a request's tokens; what no report has told yet is told now.

        Args:
            request_id: of the request.
            tokens: all of its generated tokens.
            since: `number` when the request was added.
        """
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
