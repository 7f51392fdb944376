"""`TokenRoutes`: whose a token is, for all rows of a step at once.

A table by the last bits of a request's number. The coordinator chooses the numbers, so no two
unfinished requests have one place: a look-up is one index into an array, and an entry costs the
same however many requests there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_async.serving.messages import StepTokens
from megatron_async.serving.step_arrays import StepArrays

NOBODY = -1
SMALLEST = 2**13
LARGEST = 2**20
"""Places of a table, powers of 2; beyond, a number whose place is taken is left out."""


class TokenRoutes:
    """Which client has asked for a request, and which replica serves it.

    Clients and replicas are small numbers that are not used again.

    Attributes:
        started: bool by place: whether the replica that serves the request has told a token of it.
    """

    def __init__(self) -> None:
        self._next = 0
        self._make(SMALLEST)

    def _make(self, size: int) -> None:
        self._mask = size - 1
        self._number = np.full(size, NOBODY, dtype=np.int64)
        self._replica = np.full(size, NOBODY, dtype=np.int64)
        self._client = np.full(size, NOBODY, dtype=np.int64)
        self._asked = np.full(size, NOBODY, dtype=np.int64)
        self.started = np.zeros(size, dtype=np.bool_)

    def _grow(self) -> None:
        """Twice as many places: numbers that differ in the old bits differ in more of them."""
        columns = self._number, self._replica, self._client, self._asked, self.started
        held = np.flatnonzero(columns[0] != NOBODY)
        places = columns[0][held] & (2 * len(columns[0]) - 1)
        self._make(2 * len(columns[0]))
        now = self._number, self._replica, self._client, self._asked, self.started
        for old, new in zip(columns, now, strict=True):
            new[places] = old[held]

    def add(self, client: int, asked: int) -> int:
        """Enter a request.

        Args:
            client: who asked.
            asked: what the request is called there.

        Returns:
            its number here: larger than all before.
        """
        while self._number[self._next & self._mask] != NOBODY:
            if self._mask < LARGEST:
                self._grow()
            else:
                self._next += 1  # an old request still has the place
        number, self._next = self._next, self._next + 1
        place = number & self._mask
        self._number[place], self._client[place] = number, client
        self._asked[place], self._replica[place] = asked, NOBODY
        self.started[place] = False
        return number

    def give(self, number: int, replica: int | None) -> None:
        """Another replica serves a request from its beginning; None: nobody does."""
        place = number & self._mask
        self._replica[place] = NOBODY if replica is None else replica
        self.started[place] = False

    def remove(self, number: int) -> None:
        """Forget a request."""
        self._number[number & self._mask] = self._replica[number & self._mask] = NOBODY

    def has_started(self, number: int) -> bool:
        """Whether the replica that serves a request has told a token of it."""
        return bool(self.started[number & self._mask])

    def split(self, replica: int, step: StepArrays) -> Iterator[tuple[int, StepTokens]]:
        """What each client is told of a step, with its own numbers; rows of requests that the
        replica does not serve (any more) are dropped.

        Args:
            replica: who tells.
            step: what it tells.
        """
        places = step.numbers & self._mask
        known = (self._number[places] == step.numbers) & (self._replica[places] == replica)
        self.started[places[known & (step.counts > 0)]] = True
        clients, asked = self._client[places], self._asked[places]
        all_known = bool(known.all())
        first = int(clients[0]) if len(clients) else NOBODY
        if all_known and bool((clients == first).all()):
            if len(clients):
                yield first, step.message(known, asked)
            return
        for client in np.unique(clients[known]).tolist():
            yield client, step.message(known & (clients == client), asked)
