"""Requests that wait for a slot, and the order in which requests are served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from megatron_async.inference_request import DynamicInferenceRequest

MAX_PRIORITY = 2**20
"""Priorities lie between this and its negative."""
ARRIVALS = 2**40
"""More requests than an engine will see."""


def rank_of(arrival: int, priority: int) -> int:
    """Place in the order of service: a lower rank is admitted earlier, gets blocks earlier and is
    evicted later. Higher priority first, then who came first.

    Args:
        arrival: count of the requests that came before.
        priority: at most `MAX_PRIORITY` in size.
    """
    return arrival - priority * ARRIVALS


@dataclass
class WaitingRequest:
    """A request outside of any slot, with what its admission needs."""

    request: DynamicInferenceRequest
    rank: int
    """From `rank_of`; an evicted request keeps it."""
    seed: int
    max_length: int
    """Sequence length at which the request ends."""
    is_evicted: bool = False
    """Whether its tokens were in the cache before."""

    @property
    def num_known(self) -> int:
        """Tokens to prefill: the prompt, and what was generated before an eviction."""
        return len(self.request.prompt_tokens) + len(self.request.generated_tokens)


class AdmissionQueue:
    """The order of service; an evicted request goes back to its place in it."""

    def __init__(self) -> None:
        self._queue: deque[WaitingRequest] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, waiting: WaitingRequest) -> None:
        """Queue a new request, or an evicted one again."""
        if not self._queue or self._queue[-1].rank < waiting.rank:  # who comes last, mostly
            self._queue.append(waiting)
            return
        position = 0
        while self._queue[position].rank < waiting.rank:
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
