"""How long the phases of an engine's start took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StartPhases:
    """Times phases that follow each other.

    Attributes:
        seconds: of each phase, in their order.
    """

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done inside; a name may come again."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + took

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"ready after {time.perf_counter() - self._begin:.1f} s: {parts}"
