"""`RequestQueue`: requests that no replica has, by priority and arrival; `InFlight`: all unfinished
ones and their tokens, in all and by owner, against the limits."""

from __future__ import annotations

import heapq
from collections import Counter

from megatron_async.serving.records import CoordinatorConfig, RoutedRequest

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
        """Places that requests take, also places of requests that are gone."""
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


class InFlight:
    """Counts requests from their acceptance to their ends."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self.requests = self.tokens = 0
        self._requests_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()

    def count(self, request: RoutedRequest, sign: int) -> None:
        """A request is taken (1), or has ended (-1)."""
        owner, tokens = request.asked.owner, sign * request.tokens
        self.requests += sign
        self.tokens += tokens
        if owner:
            self._requests_of[owner] += sign
            self._tokens_of[owner] += tokens
            if not self._requests_of[owner]:  # owners come and go
                del self._requests_of[owner], self._tokens_of[owner]

    def why_too_many(self, owner: str, tokens: int) -> str:
        """Why a request is refused; "" if it is accepted."""
        config = self._config
        limits = [
            (self.requests, 1, config.max_unfinished, "max_unfinished", "requests"),
            (self.tokens, tokens, config.max_tokens_in_flight, "max_tokens_in_flight", "tokens"),
        ]
        if owner:
            mine = self._requests_of[owner], self._tokens_of[owner]
            of_owner, tokens_of = config.max_unfinished_of_owner, config.max_tokens_of_owner
            limits += [
                (mine[0], 1, of_owner, "max_unfinished_of_owner", "requests of this key"),
                (mine[1], tokens, tokens_of, "max_tokens_of_owner", "tokens of this key"),
            ]
        for there, more, most, name, what in limits:
            if most is not None and there and there + more > most:
                return (
                    f"{there} {what} are unfinished, and {name} is {most}: send the request again "
                    "later, or add replicas."
                )
        return ""
