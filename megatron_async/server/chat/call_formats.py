"""How models write calls of tools: one table, with a reader and a writer for each form.

The forms are those of the model authors' chat templates. A further one is a `CallFormat` in
`FORMATS`: what its marks are, a function that reads a call (`calls_reader.py` finds where one may
begin, and leaves what is none as it is), and one that writes the grammar of `tool_choice`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from megatron_async.errors import ConfigurationError
from megatron_async.server.chat.answer_pieces import TOOL_NAME, Call, OfferedTool, ReadingCalls
from megatron_async.server.chat.call_text import (
    BLANKS,
    CallText,
    NoCall,
    Step,
    json_call,
    json_value,
)
from megatron_async.server.chat.harmony import before_answer, call_rules
from megatron_async.server.chat.thoughts import Special, mark, tool_rules
from megatron_async.server.chat.xml_calls import XML_MARKS, read_xml, xml_rules, xml_written
from megatron_async.text.harmony import MARKS

type Tools = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its arguments."""

_SEPARATORS = re.compile(r"[ \t\r\n;,]*")


@dataclass(frozen=True)
class CallFormat:
    """One way of writing calls.

    Attributes:
        name: for `--tool-parser`.
        aliases: what vLLM, SGLang and Megatron call it, with _ for -.
        marks: a call may begin with any of these.
        read: reads a call, or several that belong together, from its mark on; None: a reader of its
            own reads the whole answer, with thoughts (`chat/harmony.py`).
        rules: Lark rules whose rule `calls` is one call of a tool or, with `many`, several.
        written: a call of a name and a JSON text, for models that are shown the form.
        templates: a chat template that has all texts of one of these writes this form.
        special: special tokens that are part of it: the answer's text keeps them.
        is_bare: a text that begins with a brace may be a call, too.
        id_length: letters and digits that an id must have for the template; None: any id will do.
        before_answer: in Lark, what stands before the text of an answer that calls nothing.
    """

    name: str
    aliases: tuple[str, ...]
    marks: tuple[str, ...]
    read: Callable[[CallText, Tools], ReadingCalls] | None
    rules: Callable[[Sequence[OfferedTool], bool, Special], str]
    written: Callable[[str, str], str]
    templates: tuple[tuple[str, ...], ...]
    special: tuple[str, ...]
    is_bare: bool = False
    id_length: int | None = None
    before_answer: Callable[[Special], str] = lambda special: ""

    @cached_property
    def opening(self) -> re.Pattern[str]:
        """Finds the marks in a text."""
        return re.compile("|".join(map(re.escape, self.marks)))

    @property
    def longest_mark(self) -> int:
        """Characters."""
        return max(map(len, self.marks))

    def rules_behind_text(self, tools: Sequence[OfferedTool], many: bool, special: Special) -> str:
        """Lark rules whose rule `start` is any text without marks, then calls or the end.

        A lexeme is as long as it can be. So the text ends before the letter that would make a mark
        of its end, and the first mark is this letter alone.
        """
        rules = self.rules(tools, many, special)
        if not self.marks:
            free = self.answer_rules("/(?s:.*)/\n", special)
            return f"start: calls | wanted\n{rules}{free}"
        first = self.marks[0]
        held = [f"~/(?s:.*({'|'.join(map(re.escape, self.marks))}).*)/"]
        start = "FREE | FREE calls"
        if self.is_bare:
            start = "FREE | calls"
            held.append(r"~/(?s:[ \t\r\n]*\{.*)/")
        elif first not in special:
            rules = rules.replace(mark(first, special), json.dumps(first[-1]), 1)
        return f"start: {start}\nFREE: /(?s:.*)/ & {' & '.join(held)}\n{rules}"

    def answer_rules(self, text: str, special: Special) -> str:
        """Lark rules whose rule `wanted` is an answer that calls nothing. `text`: what a rule says
        for its text, and the line's end."""
        return f"wanted: {self.before_answer(special)} answer\nanswer: {text}"

    def is_of(self, template: str) -> bool:
        """Whether a chat template writes calls so."""
        return any(all(text in template for text in texts) for texts in self.templates)


# ---- Grammars ------------------------------------------------------------------------------------


def _object_before(key: str, name: str) -> str:
    return json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')


def _repeated(one: str, between: str, many: bool) -> str:
    return f"{one} ({between} {one})*" if many else one


# ---- Hermes: a JSON object between two marks -----------------------------------------------------


def _read_hermes(text: CallText, tools: Tools) -> ReadingCalls:
    yield from text.take("<tool_call>")
    calls: list[Call] = []
    while True:
        yield from text.blanks()
        if calls and (yield from text.closes("</tool_call>", "<tool_call>")):
            return calls
        calls.append((yield from json_call(text, tools)))


def _hermes_rules(tools: Sequence[OfferedTool], many: bool, special: Special) -> str:
    opening, closing = mark("<tool_call>", special), mark("</tool_call>", special)
    one = f'{opening} "\\n" call "\\n" {closing}'
    return f"calls: {_repeated(one, '"\\n"', many)}\n" + tool_rules(
        tools, partial(_object_before, "arguments"), '"}"'
    )


# ---- Llama 3: bare JSON objects, perhaps behind a mark -------------------------------------------


def _read_llama(text: CallText, tools: Tools) -> ReadingCalls:
    if (yield from text.next_is("<|python_tag|>")):
        yield from text.take("<|python_tag|>")
        yield from text.blanks()
    calls = [(yield from json_call(text, tools))]
    while True:
        end = text.place
        try:
            yield from text.matching(_SEPARATORS)
            calls.append((yield from json_call(text, tools)))
        except NoCall:
            text.place = end
            return calls


def _llama_rules(tools: Sequence[OfferedTool], many: bool, special: Special) -> str:
    return f"calls: {_repeated('call', '"; "', many)}\n" + tool_rules(
        tools, partial(_object_before, "parameters"), '"}"'
    )


# ---- Lists of JSON objects behind a mark ---------------------------------------------------------


def _read_list(text: CallText, tools: Tools, closing: str = "") -> ReadingCalls:
    """A list of calls; also one call without brackets."""
    yield from text.blanks()
    calls: list[Call] = []
    is_list = yield from text.next_is("[")
    text.place += len(is_list)
    while True:
        yield from text.blanks()
        calls.append((yield from json_call(text, tools)))
        if not is_list:
            break
        yield from text.blanks()
        if (yield from text.take(",", "]")) == "]":
            break
    if closing:
        yield from text.blanks()
        if not (yield from text.closes(closing)):
            raise NoCall
    return calls


def _list_rules(
    opening: str, closing: str, tools: Sequence[OfferedTool], many: bool, special: Special
) -> str:
    ends = f" {mark(closing, special)}" if closing else ""
    calls = _repeated("call", '", "', many)
    return f'calls: {mark(opening, special)} " "? "[" {calls} "]"{ends}\n' + tool_rules(
        tools, partial(_object_before, "arguments"), '"}"'
    )


def _read_nemotron(text: CallText, tools: Tools) -> ReadingCalls:
    yield from text.take("<TOOLCALL>")
    return (yield from _read_list(text, tools, "</TOOLCALL>"))


# ---- Mistral: lists, and since tokenizer 11 a name and its arguments -----------------------------


def _read_mistral(text: CallText, tools: Tools) -> ReadingCalls:
    """All forms: `[TOOL_CALLS]` and a list; or a name, perhaps `[CALL_ID]` and an id, perhaps
    `[ARGS]`, and the arguments."""
    yield from text.take("[TOOL_CALLS]")
    yield from text.blanks()
    if (yield from text.next_is("[", "{")):
        return (yield from _read_list(text, tools))
    name = yield from text.matching(TOOL_NAME)
    if (yield from text.next_is("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
        yield from text.take("[CALL_ID]")
        yield from text.matching(TOOL_NAME)
    if (yield from text.next_is("[ARGS]")):
        yield from text.take("[ARGS]")
    return [(yield from _call_of(text, name, tools))]


def _call_of(text: CallText, name: str, tools: Tools) -> Step[Call]:
    """Read the arguments of a call whose name is known."""
    yield from text.blanks()
    arguments = yield from text.json_object()
    json_value(arguments)
    if name not in tools:
        raise NoCall
    return Call(name, arguments)


def _mistral_rules(has_id: bool, tools: Sequence[OfferedTool], many: bool, special: Special) -> str:
    arguments = mark("[ARGS]", special)
    number = f"{mark('[CALL_ID]', special)} /[A-Za-z0-9]{{9}}/ {arguments}"
    behind = number if has_id else arguments
    calls = _repeated(f"{mark('[TOOL_CALLS]', special)} call", "", many)
    return f"calls: {calls}\n" + tool_rules(tools, lambda name: f"{json.dumps(name)} {behind}", "")


# ---- DeepSeek ------------------------------------------------------------------------------------

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALL_SEP = "<｜tool▁sep｜>"


def _read_deepseek(text: CallText, tools: Tools) -> ReadingCalls:
    """Both forms: V3 and R1 write the type, a line with the name, and a block of JSON; V3.1 the
    name and JSON."""
    if (yield from text.take(CALLS_BEGIN, CALL_BEGIN)) == CALL_BEGIN:
        text.place -= len(CALL_BEGIN)
    calls: list[Call] = []
    while True:
        yield from text.blanks()
        if calls and (yield from text.closes(CALLS_END)):
            return calls
        yield from text.take(CALL_BEGIN)
        name = (yield from text.until(CALL_SEP)).strip(BLANKS)
        yield from text.blanks()
        fence = ""
        if name == "function" and not (yield from text.next_is("{")):
            name = (yield from text.until("\n")).strip(BLANKS)
            yield from text.blanks()
            fence = yield from text.take("```json")
        calls.append((yield from _call_of(text, name, tools)))
        yield from text.blanks()
        if fence:
            yield from text.take("```")
            yield from text.blanks()
        if not (yield from text.closes(CALL_END)):
            raise NoCall


def _deepseek_rules(
    has_fence: bool, tools: Sequence[OfferedTool], many: bool, special: Special
) -> str:
    begin, end, sep = (mark(text, special) for text in (CALL_BEGIN, CALL_END, CALL_SEP))
    one = f"{begin} call {end}"
    calls = _repeated(one, '"\\n"' if has_fence else "", many)

    def before(name: str) -> str:
        if has_fence:
            return f'"function" {sep} {json.dumps(name + "\n```json\n")}'
        return f"{json.dumps(name)} {sep}"

    return f"calls: {mark(CALLS_BEGIN, special)} {calls} {mark(CALLS_END, special)}\n" + tool_rules(
        tools, before, json.dumps("\n```") if has_fence else ""
    )


# ---- The table -----------------------------------------------------------------------------------

_MISTRAL_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_DEEPSEEK_MARKS = (CALLS_BEGIN, CALL_BEGIN, CALL_SEP, CALL_END, CALLS_END)

FORMATS: dict[str, CallFormat] = {
    row.name: row
    for row in (
        CallFormat(
            "qwen3_coder",
            ("qwen3_xml", "qwen3.5", "nemotron_v3", "super_v3", "ultra_v3"),
            XML_MARKS, read_xml, xml_rules, xml_written,
            (("<function=", "<parameter="),), ("<tool_call>", "</tool_call>"),
        ),
        CallFormat(
            "hermes", ("qwen", "qwen25", "qwen2.5", "qwen3"),
            ("<tool_call>",), _read_hermes, _hermes_rules,
            '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'.format,
            (("<tool_call>",),), ("<tool_call>", "</tool_call>"),
        ),
        CallFormat(
            "mistral_v11", ("mistral",),
            _MISTRAL_MARKS[:1], _read_mistral, partial(_mistral_rules, True),
            "[TOOL_CALLS]{}[CALL_ID]000000000[ARGS]{}".format,
            (_MISTRAL_MARKS,), _MISTRAL_MARKS, id_length=9,
        ),
        CallFormat(
            "mistral_v13", ("mistral",),
            _MISTRAL_MARKS[:1], _read_mistral, partial(_mistral_rules, False),
            "[TOOL_CALLS]{}[ARGS]{}".format,
            (("[TOOL_CALLS]", "[ARGS]"),), _MISTRAL_MARKS, id_length=9,
        ),
        CallFormat(
            "mistral", ("mistral_v3", "mistral_v7"),
            _MISTRAL_MARKS[:1], _read_mistral, partial(_list_rules, "[TOOL_CALLS]", ""),
            '[TOOL_CALLS][{{"name": "{}", "arguments": {}}}]'.format,
            (("[TOOL_CALLS]",),), _MISTRAL_MARKS, id_length=9,
        ),
        CallFormat(
            "nemotron_json", ("nemotron_v2", "nemotron_nano_v2"),
            ("<TOOLCALL>",), _read_nemotron, partial(_list_rules, "<TOOLCALL>", "</TOOLCALL>"),
            '<TOOLCALL>[{{"name": "{}", "arguments": {}}}]</TOOLCALL>'.format,
            (("<TOOLCALL>",),), ("<TOOLCALL>", "</TOOLCALL>"),
        ),
        CallFormat(
            "deepseek_v3", ("deepseekv3", "deepseek_r1", "deepseek"),
            _DEEPSEEK_MARKS[:2], _read_deepseek, partial(_deepseek_rules, True),
            (CALLS_BEGIN + CALL_BEGIN + "function" + CALL_SEP + "{}\n```json\n{}\n```"
             + CALL_END + CALLS_END).format,
            ((CALLS_BEGIN, "```json"),), _DEEPSEEK_MARKS,
        ),
        CallFormat(
            "deepseek_v31", ("deepseekv31",),
            _DEEPSEEK_MARKS[:2], _read_deepseek, partial(_deepseek_rules, False),
            (CALLS_BEGIN + CALL_BEGIN + "{}" + CALL_SEP + "{}" + CALL_END + CALLS_END).format,
            ((CALLS_BEGIN,),), _DEEPSEEK_MARKS,
        ),
        CallFormat(
            "harmony", ("openai", "gpt_oss", "gptoss", "openai_gptoss"), (), None, call_rules,
            " to=functions.{}<|channel|>commentary json<|message|>{}".format,
            (("<|channel|>", "<|message|>"),), tuple(MARKS), before_answer=before_answer,
        ),
        CallFormat(
            "llama3_json", ("llama3", "llama4_json"),
            ("<|python_tag|>",), _read_llama, _llama_rules,
            '{{"name": "{}", "parameters": {}}}'.format,
            (("<|python_tag|>",), ('"parameters"', "ipython")), ("<|python_tag|>",), is_bare=True,
        ),
    )
}  # fmt: skip
"""By name, in the order in which templates are looked at."""

HARMONY = FORMATS["harmony"]


def format_of_template(template: str, name: str | None = None) -> CallFormat:
    """The form of a name; without one, that which the chat template writes, or Hermes', which is
    told to models whose template speaks of none. Where a name has several forms, as Mistral's, the
    template says which.

    Raises:
        ConfigurationError: there is no such form.
    """
    rows = [row for row in FORMATS.values() if row.is_of(template)]
    if name is None:
        return rows[0] if rows else FORMATS["hermes"]
    wanted = parser_name(name)
    if wanted in FORMATS and FORMATS[wanted] not in rows:
        rows = [FORMATS[wanted]]
    for row in [*rows, *FORMATS.values()]:
        if wanted == row.name or wanted in row.aliases:
            return row
    known = ", ".join(FORMATS)
    raise ConfigurationError(f"there is no tool parser {name!r}: use one of {known}.")


NEMOTRON = ("nemotron_v3", "super_v3", "ultra_v3")
REASONING = ("deepseek_r1", *NEMOTRON, HARMONY.name, *HARMONY.aliases)
"""Parsers of thoughts, which all read one form, but for harmony's."""


def check_parsers(tool: str | None, reasoning: str | None) -> bool:
    """Whether harmony is named, by the name of the tool parser or of the parser of thoughts; None:
    not named.

    Raises:
        ConfigurationError: there is no such parser, or one of both is harmony, and not the other.
    """
    names = []
    if tool is not None:
        names.append(format_of_template("", tool).name)
    if reasoning is not None:
        names.append(parser_name(reasoning))
        if names[-1] not in REASONING:
            raise ConfigurationError(
                f"there is no reasoning parser {reasoning!r}: use one of {', '.join(REASONING)}."
            )
        if names[-1] in HARMONY.aliases:
            names[-1] = HARMONY.name
    if HARMONY.name in names and len(set(names)) > 1:
        raise ConfigurationError(
            f"the tool parser {tool!r} and the reasoning parser {reasoning!r} exclude each other: "
            "harmony reads calls and thoughts; name it alone."
        )
    return HARMONY.name in names


def parser_name(name: str) -> str:
    """A parser's name without what servers write differently: case, - for _, and Megatron's ends
    -tool and -reasoning."""
    name = name.strip().lower().replace("-", "_")
    return name.removesuffix("_tool").removesuffix("_reasoning")
