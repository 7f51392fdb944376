"""`RequestQueue`: requests that no replica has, by priority and arrival."""

from __future__ import annotations

import heapq

from megatron_async.serving.records import RoutedRequest

FEW_STALE = 16
"""Entries without a request that may always stand in a queue."""


class RequestQueue:
    """A heap whose entries may outlive their requests, but never become more than twice as many."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._requests: dict[int, RoutedRequest] = {}

    def __len__(self) -> int:
        """Requests in it."""
        return len(self._requests)

    @property
    def entries(self) -> int:
        """Places that they take, with those of requests that are gone."""
        return len(self._heap)

    def add(self, request: RoutedRequest) -> None:
        """Queue a request; one that comes again takes its old place."""
        self._requests[request.number] = request
        heapq.heappush(self._heap, (request.order, request.number))

    def discard(self, request: RoutedRequest) -> None:
        """Take a request out, if it is in."""
        if self._requests.pop(request.number, None) is None:
            return
        if len(self._heap) > 2 * len(self._requests) + FEW_STALE:
            self._heap = sorted((each.order, number) for number, each in self._requests.items())

    def first(self) -> RoutedRequest | None:
        """Whose turn it is; it stays in. None: the queue is empty."""
        while self._heap:
            request = self._requests.get(self._heap[0][1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def in_order(self) -> list[RoutedRequest]:
        """All of them."""
        return sorted(self._requests.values(), key=lambda request: request.order)
