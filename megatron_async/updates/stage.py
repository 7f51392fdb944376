"""What the engine knows of new weights."""

from __future__ import annotations

from typing import Protocol


class Stage(Protocol):
    """New weights that wait on this rank for their step."""

    def commit(self) -> bool:
        """Enqueue the copies into the model, and the derived copies after them, on the compute
        stream; nothing waits, but on a CPU, where the copies are made at once.

        Called once, between two launches, on the thread that launches steps.

        Returns:
            whether some weights lie elsewhere now, so that captured steps must be captured again.
        """

    def drop(self) -> None:
        """Give the memory back; the model is as it was. Does nothing after `commit`."""
