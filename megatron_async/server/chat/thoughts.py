"""`<think>` ... `</think>`: what a model thinks before it answers, in the form that DeepSeek R1,
Qwen 3 and others share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import override

from megatron_async.errors import RequestError
from megatron_async.server.chat.answer_pieces import (
    CallReader,
    Content,
    OfferedTool,
    Piece,
    Thought,
)
from megatron_async.text.structured_output import StructuredOutput

type Special = Mapping[str, int]
"""Mark -> id, of those that are special tokens of the tokenizer."""

OPEN, CLOSE = "<think>", "</think>"
_SLASH = re.compile(r"\\.|/", re.DOTALL)


class ThoughtReader(CallReader):
    """Takes thoughts off the beginning of a text, and gives the rest to another reader. `inside`:
    the prompt has opened a thought, which the text may open again. Without `rest`, what is no
    thought is content."""

    def __init__(self, inside: bool, rest: CallReader | None) -> None:
        self._rest = rest
        self._state, self._plain = "before", "inside" if inside else "behind"
        self._held = ""
        self._blanks: list[str] = []
        """Before the first word."""
        self._is_new = True
        """Nothing of the part that is being read has been given: blanks are left out."""

    @override
    def push(self, text: str) -> list[Piece]:
        if self._state == "behind" and not self._held:
            return self._behind(text)
        found: list[Piece] = []
        if self._state == "before":
            begun = text if self._held else text.lstrip()
            self._blanks.append(text[: len(text) - len(begun)])
            self._held += begun
            if OPEN.startswith(self._held[: len(OPEN)]) and len(self._held) < len(OPEN):
                return found  # it may become a thought
            if self._held.startswith(OPEN):
                self._state, self._held = "inside", self._held[len(OPEN) :]
            else:
                self._state, self._is_new = self._plain, self._plain == "inside"
                self._held = self._before()
        else:
            self._held += text
        if self._state == "inside":
            end = self._held.find(CLOSE)
            if end < 0:
                keep = overlap(self._held, CLOSE)
                text, self._held = (
                    self._held[: len(self._held) - keep],
                    self._held[-keep or len(self._held) :],
                )
                return self._thought(text)
            found += self._thought(self._held[:end])
            self._held, self._state, self._is_new = self._held[end + len(CLOSE) :], "behind", True
        text, self._held = self._held, ""
        return found + self._behind(text)

    @override
    def end(self) -> list[Piece]:
        text = self._held
        if self._state == "before":
            text, self._state = self._before(), self._plain
        self._held = ""
        if self._state == "inside":
            return self._thought(text)
        self._is_new = False
        found = self._behind(text)
        return found + (self._rest.end() if self._rest else [])

    def _before(self) -> str:
        """What has come, where it is no thought after all."""
        return "".join(self._blanks) + self._held

    def _thought(self, text: str) -> list[Piece]:
        text = self._unpadded(text)
        return [Thought(text)] if text else []

    def _behind(self, text: str) -> list[Piece]:
        text = self._unpadded(text)
        if not text:
            return []
        return self._rest.push(text) if self._rest else [Content(text)]

    def _unpadded(self, text: str) -> str:
        """Models put line breaks behind the tags, which belong to neither part."""
        if self._is_new:
            text = text.lstrip("\n")
            self._is_new = not text
        return text


def overlap(text: str, mark: str) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def mark(text: str, special: Special) -> str:
    """A mark in Lark: llguidance's way to write a token by its id, or the text."""
    return f"<[{special[text]}]>" if text in special else json.dumps(text, ensure_ascii=False)


def tool_rules(tools: Sequence[OfferedTool], before: Callable[[str], str], after: str) -> str:
    """Rules whose rule `call` is the arguments of one tool between two texts in Lark. Each schema
    is a grammar of its own, so that references inside of it hold."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        arguments = f"%json {json.dumps(dict(tool.parameters))}"
        rules.append(f"call_{i}: {before(tool.name)} {arguments} {after}")
    return "\n".join(rules) + "\n"


def in_lark(regex: str) -> str:
    """A regular expression as it stands between Lark's slashes."""
    return _SLASH.sub(lambda found: "\\/" if found[0] == "/" else found[0], regex)


def grammar_behind_thought(wanted: StructuredOutput, in_thought: bool) -> str:
    """A Lark grammar: a thought, then what is wanted. `in_thought`: the prompt has opened the
    thought; else the answer may open one, or not."""
    thought = 'thought[suffix="</think>"]: /(?s:.*)/\n'
    start = "thought blank" if in_thought else '("<think>" thought blank)?'
    return f"start: {start} wanted\n{thought}blank: /[ \\n]*/\nwanted: {rule_of(wanted)}"


def rule_of(wanted: StructuredOutput) -> str:
    """What a rule of a Lark grammar says for all that is wanted, and the line's end."""
    fixed = wanted.fixed()
    fixed.source()
    if fixed.grammar is not None:
        if not re.search(r"^start\s*:", fixed.grammar, re.MULTILINE):
            raise RequestError("grammar has no rule `start`: name its first rule so.")
        # A grammar inside of this one: its names, and texts such as "start" in it, stay its own.
        return f"%lark {{\n{fixed.grammar}\n}}\n"
    if fixed.json_schema is not None:
        return f"%json {fixed.json_schema}\n"
    if fixed.regex is not None:
        return f"/{in_lark(fixed.regex)}/\n"
    return " | ".join(json.dumps(text) for text in fixed.choice or ()) + "\n"
