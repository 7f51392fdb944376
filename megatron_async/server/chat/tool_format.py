"""`ToolFormat`: how a family of models writes calls of functions into its text."""

from __future__ import annotations

from typing import Any, Protocol


class ToolFormat(Protocol):
    """Finds calls in an answer's text."""

    name: str

    def calls_in(self, text: str) -> list[dict[str, Any]]:
        """The calls, each with `name` and `arguments` (JSON text)."""
