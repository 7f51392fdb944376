"""Requests that wait for a slot, and the order in which requests are served."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from megatron_async.requests.inference_request import DynamicInferenceRequest

MAX_PRIORITY = 2**20
"""Priorities lie between this and its negative."""
ARRIVALS = 2**40
"""More requests than an engine will see."""
MOST_LEFTOVERS = 64
"""Entries of the queue's heap that may be out of date, beside as many as are not."""


def rank_of(arrival: int, priority: int) -> int:
    """Rank of a request in the order of service: a lower rank is admitted earlier, gets blocks
    earlier and is evicted later. Higher priority comes first, then the earlier request.

    Args:
        arrival: count of the requests that came before.
        priority: at most `MAX_PRIORITY` in size.
    """
    return arrival - priority * ARRIVALS


class AdmissionQueue:
    """Waiting requests in the order of service; an evicted request returns to its place by rank.

    A heap by rank and a mapping by id, so that operations stay cheap with many waiting requests. A
    request that is removed by id leaves its heap entry until the entry comes to the top, or until
    most entries are outdated.

    Attributes:
        num_known: tokens to prefill, of all requests that wait.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, DynamicInferenceRequest] = {}
        self._heap: list[tuple[int, int]] = []
        """(rank, request id)."""
        self.num_known = 0

    def clear(self) -> None:
        """Forget all requests."""
        self._by_id, self._heap, self.num_known = {}, [], 0

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, waiting: DynamicInferenceRequest) -> None:
        """Queue a new request, or an evicted one again."""
        request_id = waiting.request_id
        self._by_id[request_id] = waiting
        self.num_known += waiting.num_known
        heappush(self._heap, (waiting.rank, request_id))

    def first(self) -> DynamicInferenceRequest:
        """The request that is admitted next."""
        while not self._is_waiting(self._heap[0]):
            heappop(self._heap)
        return self._by_id[self._heap[0][1]]

    def pop(self) -> DynamicInferenceRequest:
        """Take the first request out."""
        waiting = self.first()
        heappop(self._heap)
        self.num_known -= waiting.num_known
        return self._by_id.pop(waiting.request_id)

    def remove(self, request_id: int) -> DynamicInferenceRequest | None:
        """Take a request out by id; None if it does not wait here."""
        waiting = self._by_id.pop(request_id, None)
        if waiting is not None:
            self.num_known -= waiting.num_known
        if len(self._heap) > 2 * len(self._by_id) + MOST_LEFTOVERS:
            self._heap = [entry for entry in self._heap if self._is_waiting(entry)]
            heapify(self._heap)
        return waiting

    def in_order(self) -> list[DynamicInferenceRequest]:
        """All waiting requests, in order of rank."""
        return sorted(self._by_id.values(), key=lambda waiting: waiting.rank)

    def check_integrity(self) -> None:
        """Raise AssertionError unless `num_known` is the sum over the requests that wait."""
        known = sum(waiting.num_known for waiting in self._by_id.values())
        assert known == self.num_known, f"{known} tokens wait, {self.num_known} are counted"

    def _is_waiting(self, entry: tuple[int, int]) -> bool:
        rank, request_id = entry
        waiting = self._by_id.get(request_id)
        return waiting is not None and waiting.rank == rank  # the id may be another request's now
