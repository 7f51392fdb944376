"""Harmony, gpt-oss's messages: channels of thoughts, of calls and of the answer, told apart by
tokens (`text/harmony.py`).

An answer goes on behind `<|start|>assistant`, and may be several messages. Which part of it a
message is, its header says: " to=RECIPIENT", before or behind the channel's name, is a call;
"analysis" is a thought; "final", and "commentary" to nobody, is content. All else is dropped.
Facts: openai/harmony, docs/format.md; what becomes of each message: vLLM, parser/harmony.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, override

from megatron_async.server.chat.answer_pieces import (
    CallArguments,
    CallBegin,
    CallReader,
    Content,
    OfferedTool,
    Piece,
    Thought,
)
from megatron_async.server.chat.call_text import BLANKS, NoCall, object_text
from megatron_async.server.chat.thoughts import Special, mark, rule_of, tool_rules
from megatron_async.text.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MARKS,
    MESSAGE,
    RETURN,
    START,
    marked,
)
from megatron_async.text.structured_output import StructuredOutput

EFFORTS = ("low", "medium", "high")
"""Values of `reasoning_effort` that models of this format know."""
MOST_HEADER = 1024
"""Characters of a message's header; a message with more is dropped."""
FUNCTIONS = "functions."
"""Begin of the recipients that are tools of the client."""
_ANY_MARK = "".join(MARKS.values())
_PARTS = re.compile(f"([{_ANY_MARK}])")
# Older files have the constrain mark's name as text, with no blank before it.
_WORD = f"[^\\s<{_ANY_MARK}]*"
_FIRST = re.compile(rf"\s*({_WORD})")
_RECIPIENT = re.compile(rf"(?:^|[\s{_ANY_MARK}])to=({_WORD})")


class Header(NamedTuple):
    """What a message's header says of it.

    Attributes:
        kind: the part of the answer that the message's content is.
        name: of the tool that is called.
        is_reasoning: its tokens count as reasoning, as at OpenAI.
    """

    kind: Literal["thought", "text", "call", "dropped"]
    name: str = ""
    is_reasoning: bool = False


def read_header(header: str) -> Header:
    """Read the text between `<|start|>` and `<|message|>`, with the characters of marks."""
    role, *behind = header.split(MARKS[CHANNEL])
    channel = _word(behind[-1]) if behind else "final"
    found = _RECIPIENT.search(header)
    recipient = found[1] if found else ""
    if len(header) >= MOST_HEADER or _word(role) not in ("", "assistant"):
        return Header("dropped")
    is_reasoning = channel == "analysis" or bool(recipient)
    if recipient.startswith(FUNCTIONS):
        return Header("call", recipient.removeprefix(FUNCTIONS), is_reasoning)
    if recipient:
        return Header("dropped", "", is_reasoning)
    if channel == "analysis":
        return Header("thought", "", is_reasoning)
    return Header("text" if channel in ("final", "commentary") else "dropped")


def _word(text: str) -> str:
    """The first word; none where a recipient comes first."""
    found = _FIRST.match(text)
    assert found is not None, "it matches nothing, too"
    return "" if found[1].startswith("to=") else found[1]


def begun_header(prompt: str) -> str:
    """What a prompt has begun of the assistant's next message, up to its content, with the
    characters of marks; "" if it has begun none."""
    text = marked(prompt.rpartition(START)[2]) if START in prompt else ""
    header, message, _ = text.partition(MARKS[MESSAGE])
    is_over = any(MARKS[name] in text for name in (END, RETURN, CALL))
    return "" if is_over else header + message


class MessageTokens:
    """Counts the tokens of the messages' contents, without special ones. `marks` are by id; of
    `hidden` tokens texts have nothing; `begun` is what the prompt has."""

    def __init__(self, marks: Mapping[int, str], hidden: Iterable[int], begun: str) -> None:
        self._marks, self._hidden = marks, frozenset(hidden)
        self._counts = [0] * begun.count(MARKS[MESSAGE])
        self._is_inside = bool(self._counts)

    def take(self, tokens: Sequence[int]) -> None:
        """Count the next tokens."""
        for token in tokens:
            found = self._marks.get(token)
            if found is None:
                if self._is_inside and token not in self._hidden:
                    self._counts[-1] += 1
            elif found == MARKS[MESSAGE]:
                self._counts.append(0)
                self._is_inside = True
            elif found != MARKS[CONSTRAIN]:
                self._is_inside = False

    def of(self, chosen: Iterable[bool]) -> int:
        """The tokens of the messages that are chosen, one truth value each."""
        return sum(n for n, is_chosen in zip(self._counts, chosen) if is_chosen)


class ChannelReader(CallReader):
    """Takes an answer's text apart; in the text are the characters of marks.

    A text without any mark, of a model that was trained otherwise, is content. So is what is
    addressed to a function but is no call: the function was not offered, or the arguments are no
    JSON object.

    Args:
        begun: what the prompt has of the first message (`begun_header`).
        tools: that may be called.
        is_forced: a grammar lets nothing but calls and thoughts be written; what else is content
            was cut off, and is dropped.

    Attributes:
        reasoning: of each message, whether its tokens count as reasoning.
    """

    def __init__(
        self, begun: str, tools: Mapping[str, Mapping[str, Any]], is_forced: bool = False
    ) -> None:
        self._tools, self._is_forced = tools, is_forced
        self._header = ""
        self._open: Header | None = None
        """The message whose content comes now."""
        self._arguments: list[str] = []
        self._is_new = False
        """Nothing of the message was told."""
        self._told: set[type[Thought] | type[Content]] = set()
        self._begun = 0
        self._is_plain = False
        """No mark has come, neither here nor in what was begun."""
        self.reasoning: list[bool] = []
        self.push(begun)
        self._begun = len(self._header)
        self._is_plain = _PARTS.search(begun) is None

    @override
    def push(self, text: str) -> list[Piece]:
        found: list[Piece] = []
        for place, part in enumerate(_PARTS.split(text)):
            if place % 2:
                self._mark(part, found)
            elif part and self._open is None:
                self._head(part, found)
            elif part:
                self._say(part, found)
        return found

    @override
    def end(self) -> list[Piece]:
        found: list[Piece] = []
        if self._is_plain and self._open is None:
            self._open = Header("text")
            self._say(self._header[self._begun :], found)
        self._close(found)
        return found

    def _mark(self, character: str, found: list[Piece]) -> None:
        self._is_plain = False
        if character == MARKS[MESSAGE]:
            if self._open is None:
                self._open, self._is_new = read_header(self._header), True
            self.reasoning.append(self._open.is_reasoning)
        elif character in (MARKS[CHANNEL], MARKS[CONSTRAIN]) and self._open is None:
            self._header = self._header[:MOST_HEADER] + character
        elif character != MARKS[CONSTRAIN]:
            # A channel behind a content: the model has left out the end and the new start.
            self._close(found)
            self._header = character if character == MARKS[CHANNEL] else ""

    def _head(self, text: str, found: list[Piece]) -> None:
        """Take more of a header; or of the content, where no header can begin so."""
        header = self._header + text
        begin = header[self._begun :][:MOST_HEADER]
        recipient = begin.lstrip()[:3]
        is_blank = len(begin) == MOST_HEADER and not recipient
        if self._is_plain and (is_blank or not "to=".startswith(recipient)):
            self._open = Header("text")
            self._say(header[self._begun :], found)
        else:
            self._header = header[: self._begun + MOST_HEADER]

    def _say(self, text: str, found: list[Piece]) -> None:
        """Tell more of the open message's content."""
        assert self._open is not None, "its header has come"
        if self._open.kind == "call":
            self._arguments.append(text)
        elif self._open.kind != "dropped":
            self._tell(Thought if self._open.kind == "thought" else Content, text, found)

    def _tell(self, kind: type[Thought] | type[Content], text: str, found: list[Piece]) -> None:
        if not text or (self._is_forced and kind is Content):
            return
        if self._is_new and kind in self._told:
            text = "\n" + text
        self._is_new = False
        self._told.add(kind)
        found.append(kind(text))

    def _close(self, found: list[Piece]) -> None:
        """End the open message, if there is one."""
        message, self._open = self._open, None
        if message is None or message.kind != "call":
            return
        text, self._arguments = "".join(self._arguments), []
        try:
            if message.name not in self._tools:
                raise NoCall
            arguments = object_text(text.strip(BLANKS) or "{}")
        except NoCall:
            self._tell(Content, text, found)
        else:
            found += [CallBegin(message.name), CallArguments(arguments)]


# ---- Prompts -------------------------------------------------------------------------------------


def channel_messages(
    messages: Sequence[dict[str, Any]], is_continued: bool
) -> list[dict[str, Any]]:
    """The messages of `template_messages` as the models' own template takes them: thoughts are
    named `thinking`, and there are none before the last final message; a message has one call, and
    its result comes next. `is_continued`: the last message is being written."""
    finals = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and "tool_calls" not in message
    ]
    last = finals[-1] if finals else -1
    if is_continued and last == len(messages) - 1:
        last = finals[-2] if len(finals) > 1 else -1
    found: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        end = place + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        found += _of_one_message(messages[place], messages[place + 1 : end], place > last)
        place = end
    return found


def _of_one_message(
    given: Mapping[str, Any], results: Sequence[dict[str, Any]], keeps_thoughts: bool
) -> list[dict[str, Any]]:
    """A message for each call of one, each with its result; `results` are those behind it."""
    message = dict(given)
    thoughts = message.pop("reasoning_content", "")
    calls = message.get("tool_calls", ())
    if thoughts and keeps_thoughts:
        if calls and message["content"]:
            # The template takes one of both for such a message, and writes either as a thought.
            thoughts, message["content"] = f"{thoughts}\n{message['content']}", ""
        message["thinking"] = message["reasoning_content"] = thoughts
    if len(calls) < 2:
        return [message, *results]
    of_call: dict[str | None, list[dict[str, Any]]] = {}
    for result in results:
        of_call.setdefault(result.get("tool_call_id"), []).append(result)
    found: list[dict[str, Any]] = []
    for call in calls:
        found += [{**message, "tool_calls": [call]}, *of_call.pop(call["id"], ())]
        message = {"role": "assistant", "content": ""}
    return found + [result for left in of_call.values() for result in left]


# ---- Grammars ------------------------------------------------------------------------------------


def call_rules(tools: Sequence[OfferedTool], many: bool, special: Special) -> str:
    """Lark rules whose rule `calls` is messages to tools."""
    channel, message = mark(CHANNEL, special), mark(MESSAGE, special)

    def before(name: str) -> str:
        to = json.dumps(f" to={FUNCTIONS}{name}")
        where = f'({to} {channel} "commentary" | {channel} "commentary" {to})'
        return f"{where} {_json(special)} {message}"

    more = f" ({_next_message(special)} call)*" if many else ""
    return f"calls: call{more}\n" + tool_rules(tools, before, "")


def before_answer(special: Special) -> str:
    """What stands in Lark before the text of an answer that calls nothing: its header."""
    return f'{mark(CHANNEL, special)} "final" {_json(special)} {mark(MESSAGE, special)}'


def grammar_behind_messages(
    wanted: StructuredOutput, begun: str, special: Special, has_calls: bool, has_format: bool
) -> str:
    """A Lark grammar: thoughts, then what is wanted. `begun` is what the prompt has of the first
    message; `has_calls`: what is wanted has the headers of messages; `has_format`: it is all that
    the content may be. Else words may come before."""
    channel, message = mark(CHANNEL, special), mark(MESSAGE, special)
    start = "" if begun else f'({mark(START, special)} "assistant")?'
    header = "" if has_calls else before_answer(special)
    free = '"analysis"' if has_format else "/analysis|commentary/"
    if MARKS[CHANNEL] in begun or MARKS[MESSAGE] in begun:
        start = "" if MARKS[MESSAGE] in begun else message
        if read_header(begun.partition(MARKS[MESSAGE])[0]).kind == "text" and not has_calls:
            return f"start: {start} wanted\nwanted: {rule_of(wanted)}"
        start += f" FREE {_next_message(special)}"
    return (
        f"start: {start} other* {header} wanted\n"
        f"other: {channel} {free} {message} FREE {_next_message(special)}\n"
        f"FREE: /(?s:.*)/\nwanted: {rule_of(wanted)}"
    )


def _next_message(special: Special) -> str:
    return f'{mark(END, special)} {mark(START, special)} "assistant"'


def _json(special: Special) -> str:
    """How a header says that JSON comes, or nothing."""
    return f'(" "? {mark(CONSTRAIN, special)} "json" | " json")?'
