"""`ToolFormat`: how a family of models writes calls of tools; and what readers of texts tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Thought:
    """Text inside `<think>` ... `</think>`."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a function begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments' JSON text, of the newest call."""

    text: str


Piece = Thought | Content | CallBegin | CallArguments
"""The parts of a text, in order."""


class CallReader(Protocol):
    """Takes one choice's text apart."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is settled by it."""

    def end(self) -> list[Piece]:
        """The remaining parts, at the end of the text."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function as the grammar needs it.

    Attributes:
        name: of the function.
        parameters: JSON schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]


class ToolFormat(Protocol):
    """A way of writing calls.

    Attributes:
        name: for `--tool-parser`.
        special: special tokens that are part of it: the text keeps them.
    """

    name: str
    special: tuple[str, ...]

    def reader(self) -> CallReader:
        """A new reader, for one choice."""

    def grammar(self, tools: Sequence[OfferedTool], many: bool, special: Mapping[str, int]) -> str:
        """Lark rules whose rule `calls` is one call of a tool or, if `many`, several.

        Args:
            tools: any of which may be called.
            many: several calls are allowed.
            special: ids of those of its special tokens that the tokenizer has as such.
        """

    def written(self, name: str, arguments: str) -> str:
        """A call as text, for models that are shown the format.

        Args:
            name: of the function.
            arguments: JSON text.
        """
