"""`RequestQueue`: requests that no replica has, by priority and arrival."""

from __future__ import annotations

import heapq

from megatron_async.serving.records import RoutedRequest

FEW_STALE = 16
"""Entries without a request that may always stand in a queue."""


class RequestQueue:
    """Two heaps, one of suspects, whose entries may outlive their requests, but never become more
    than twice as many."""

    def __init__(self) -> None:
        self._heaps: dict[bool, list[tuple[tuple[int, int], int]]] = {False: [], True: []}
        self._requests: dict[int, RoutedRequest] = {}

    def __len__(self) -> int:
        """Requests in it."""
        return len(self._requests)

    @property
    def entries(self) -> int:
        """Places that they take, with those of requests that are gone."""
        return sum(map(len, self._heaps.values()))

    def add(self, request: RoutedRequest) -> None:
        """Queue a request; one that comes again takes its old place."""
        self._requests[request.number] = request
        heapq.heappush(self._heaps[request.is_suspect], (request.order, request.number))

    def discard(self, request: RoutedRequest) -> None:
        """Take a request out, if it is in."""
        if self._requests.pop(request.number, None) is None:
            return
        if self.entries > 2 * len(self._requests) + FEW_STALE:
            self._heaps = {False: [], True: []}
            for number, each in sorted(self._requests.items(), key=lambda item: item[1].order):
                self._heaps[each.is_suspect].append((each.order, number))

    def first(self, suspects: bool = False) -> RoutedRequest | None:
        """The next request, among suspects or the others; it stays queued. None: there is none."""
        heap = self._heaps[suspects]
        while heap:
            request = self._requests.get(heap[0][1])
            if request is not None and request.is_suspect == suspects:
                return request
            heapq.heappop(heap)
        return None

    def in_order(self) -> list[RoutedRequest]:
        """All of them."""
        return sorted(self._requests.values(), key=lambda request: request.order)
