"""`RoutingRecord`: to which experts the tokens of a request went, for a trainer to replay."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.unsignedinteger[Any]]
"""uint8 or uint16 `[positions, layers with experts, topk]`."""


class RowsOnTheirWay(Protocol):
    """Rows that are being copied to the host."""

    @property
    def is_ready(self) -> bool:
        """Whether `take` does not wait."""

    def take(self) -> Rows:
        """The rows; waits for the copy."""


class RoutingRecord:
    """The experts of a request's positions, each as its first computation had them: copied when the
    request loses its blocks, at its end and at evictions before. So a prefill after an eviction
    changes nothing. Of a prefix that was found, they are those of the blocks' writer.

    Attributes:
        num_rows: positions, from the first one on, that are kept.
        replacements: how often all that was kept was thrown away and computed anew: after a change
            of weights with policy "recompute", and after a failure of the engine's.
    """

    def __init__(self) -> None:
        self.num_rows = self.replacements = 0
        self._parts: list[RowsOnTheirWay] = []
        self._rows: Rows | None = None

    def add(self, part: RowsOnTheirWay, end: int) -> None:
        """`part` has the rows from `num_rows` to `end` - 1."""
        self._parts.append(part)
        self.num_rows = end

    def forget(self) -> None:
        """All positions are computed anew."""
        self.replacements += self.num_rows > 0
        self.num_rows, self._parts, self._rows = 0, [], None

    @property
    def is_ready(self) -> bool:
        """Whether all copies are done."""
        return all(part.is_ready for part in self._parts)

    def take(self) -> Rows | None:
        """All rows; None where there is none. Waits for copies."""
        if self._parts:
            parts, self._parts = [part.take() for part in self._parts], []
            self._rows = np.concatenate(parts if self._rows is None else [self._rows, *parts])
        return self._rows
