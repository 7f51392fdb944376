"""What readers of texts tell: thoughts, content, calls; and the tools that may be called."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Names of tools: OpenAI's are at most 64 long, Anthropic's 128."""


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
    """A function as the grammar needs it."""

    name: str
    parameters: Mapping[str, Any]


class Call(NamedTuple):
    """A call that was read; the arguments are the JSON text of an object."""

    name: str
    arguments: str


type ReadingCalls = Generator[None, None, list[Call]]
"""Reads calls in a text that arrives; yields where more of it must come first."""
