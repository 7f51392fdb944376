"""`TokenRoutes`: the client of each token, for all rows of a step at once.

A table indexed by the last bits of a request's number. The coordinator chooses the numbers so that
unfinished requests never share a place. So a look-up is one index into an array, and an entry costs
the same for any number of requests.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_async.serving.messages import StepTokens
from megatron_async.serving.step_arrays import StepArrays

NOBODY = -1
SMALLEST = 2**13
LARGEST = 2**20
"""Most places of a table, a power of 2. In a table of this size, numbers whose place is taken are
skipped."""


class TokenRoutes:
    """Which client has asked for a request, and which replica serves it.

    Clients and replicas are small numbers that are not used again.

    Attributes:
        started: bool by place: whether the replica that serves the request has sent a token of it.
    """

    def __init__(self, first: int = 0) -> None:
        self._next = first
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
        """Enter a request. `asked` is the client's number of it. Returns its number here: larger
        than all before."""
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
        """Another replica serves a request from its beginning; None: no replica does."""
        place = number & self._mask
        self._replica[place] = NOBODY if replica is None else replica
        self.started[place] = False

    def remove(self, number: int) -> None:
        """Forget a request."""
        self._number[number & self._mask] = self._replica[number & self._mask] = NOBODY

    def has_started(self, number: int) -> bool:
        """Whether the replica that serves a request has sent a token of it."""
        return bool(self.started[number & self._mask])

    def whole(self, replica: int, message: StepTokens) -> tuple[int, StepTokens] | None:
        """A step whose rows are all served by the replica for one client, have equally many tokens
        and no log probs: the client, and the step with its numbers. None: it is another step.

        Nearly all steps are so, with one API process. Bytes are compared: a NumPy function takes
        several times as long where caches are cold, and a first token waits for it."""
        numbers, counts = message.numbers, message.counts
        rows, count = len(numbers) // 8, int.from_bytes(counts[:4], "little", signed=True)
        if message.log_probs is not None or rows < 1 or count < 1 or len(numbers) != 8 * rows:
            return None
        if len(counts) != 4 * rows or len(message.tokens) != 4 * count * rows:
            return None
        if counts != counts[:4] * rows:
            return None
        places = np.frombuffer(numbers, np.int64) & self._mask
        clients = self._client[places].tobytes()
        if (
            self._number[places].tobytes() != numbers
            or self._replica[places].tobytes() != replica.to_bytes(8, "little") * rows
            or clients != clients[:8] * rows
        ):
            return None
        self.started[places] = True
        asked = self._asked[places].tobytes()
        client = int.from_bytes(clients[:8], "little")
        return client, StepTokens(asked, counts, message.tokens)

    def split(self, replica: int, step: StepArrays) -> Iterator[tuple[int, StepTokens]]:
        """Each client's part of a step, with the client's own numbers. Rows of requests that the
        replica does not serve, or not any more, are dropped."""
        places = step.numbers & self._mask
        known = (self._number[places] == step.numbers) & (self._replica[places] == replica)
        self.started[places[known & (step.counts > 0)]] = True
        clients, asked = self._client[places], self._asked[places]
        if not len(clients):
            return
        first = int(clients[0])
        if known.all() and (clients == first).all():
            yield first, step.renamed(asked)
            return
        for client in np.unique(clients[known]).tolist():
            yield client, step.message(known & (clients == client), asked)
