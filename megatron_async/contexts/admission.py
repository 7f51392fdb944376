"""Requests that wait for a slot, in order of arrival."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from megatron_async.inference_request import DynamicInferenceRequest


@dataclass
class WaitingRequest:
    """A request outside of any slot, with what its admission needs."""

    request: DynamicInferenceRequest
    arrival: int
    """Rank in order of arrival; an evicted request keeps it."""
    seed: int
    max_length: int
    """Sequence length at which the request ends."""

    @property
    def num_known(self) -> int:
        """Tokens to prefill: the prompt, and what was generated before an eviction."""
        return len(self.request.prompt_tokens) + len(self.request.generated_tokens)


class AdmissionQueue:
    """First come, first served; an evicted request goes back to its place by arrival."""

    def __init__(self) -> None:
        self._queue: deque[WaitingRequest] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, waiting: WaitingRequest) -> None:
        """Append a new request."""
        self._queue.append(waiting)

    def put_back(self, waiting: WaitingRequest) -> None:
        """Return an evicted request. Those before it arrived earlier; normally there are none."""
        position = 0
        while position < len(self._queue) and self._queue[position].arrival < waiting.arrival:
            position += 1
        self._queue.insert(position, waiting)

    def first(self) -> WaitingRequest:
        """The request that is admitted next."""
        return self._queue[0]

    def pop(self) -> WaitingRequest:
        """Take the first request out."""
        return self._queue.popleft()

    def remove(self, request_id: int) -> WaitingRequest | None:
        """Take a request out by id; None if it does not wait here."""
        for waiting in self._queue:
            if waiting.request.request_id == request_id:
                self._queue.remove(waiting)
                return waiting
        return None
