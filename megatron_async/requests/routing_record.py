"""`RoutingRecord`: to which experts the tokens of a request went, for a trainer to replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.unsignedinteger[Any]]
"""uint8 or uint16 `[positions, layers with experts, topk]`."""


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
        self._parts: list[tuple[Callable[[], bool], Callable[[], Rows]]] = []
        self._rows: Rows | None = None

    def add(self, is_there: Callable[[], bool], take: Callable[[], Rows], end: int) -> None:
        """The rows from `num_rows` to `end` - 1 are being copied; `take` waits for that."""
        self._parts.append((is_there, take))
        self.num_rows = end

    def forget(self) -> None:
        """All positions are computed anew."""
        self.replacements += self.num_rows > 0
        self.num_rows, self._parts, self._rows = 0, [], None

    @property
    def is_ready(self) -> bool:
        """Whether all copies are done."""
        return all(is_there() for is_there, _ in self._parts)

    def take(self) -> Rows | None:
        """All rows; None where there is none. Waits for copies."""
        if self._parts:
            parts, self._parts = [take() for _, take in self._parts], []
            self._rows = np.concatenate(parts if self._rows is None else [self._rows, *parts])
        return self._rows
