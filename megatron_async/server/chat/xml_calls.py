"""Calls as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them: a tag for the function and one for each
parameter, whose values are plain text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The type of a value is what the tool's JSON schema says: the text `5` is a number for an integer and
a text for a string. A parameter without a type, or that the schema does not have, is a string, as
for Megatron's and vLLM's parsers; so is a value that is none of the types it may have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_async.errors import RequestError
from megatron_async.server.chat.answer_pieces import TOOL_NAME, Call, OfferedTool, ReadingCalls
from megatron_async.server.chat.call_text import BLANKS, CallText, NoCall, Step
from megatron_async.server.chat.json_calls import json_value
from megatron_async.server.chat.thoughts import in_lark
from megatron_async.server.chat.tool_types import KINDS, ToolTypes, ValueTypes
from megatron_async.text.grammar_limits import check_size
from megatron_async.text.schema_numbers import NOTES

XML_MARKS = ("<tool_call>", "<function=")
"""Qwen3-Coder sometimes leaves the outer tag out."""
PARAMETER, PARAMETER_END, FUNCTION_END = "<parameter=", "</parameter>", "</function>"

_INTEGER = re.compile(r"(-?\d+)(?:\.0+)?")
_NUMBER = re.compile(r"-?\d.*", re.DOTALL)
_WORDS = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}
"""Templates write True, False and None of Python's values."""
LENGTHS = ("minLength", "maxLength")


# ---- Reading -------------------------------------------------------------------------------------


def read_xml(text: CallText, tools: Mapping[str, Mapping[str, Any]]) -> ReadingCalls:
    """Read the calls of one `<tool_call>`, or one call without that tag."""
    mark = yield from text.take(*XML_MARKS)
    calls: list[Call] = []
    while True:
        if mark != "<function=":
            yield from text.blanks()
            yield from text.take("<function=")
        calls.append((yield from _function(text, tools)))
        end = text.place
        yield from text.blanks()
        if (yield from text.closes("</tool_call>")):
            return calls
        if mark == "<function=":
            text.place = end
            return calls


def _function(text: CallText, tools: Mapping[str, Mapping[str, Any]]) -> Step[Call]:
    name = yield from text.matching(TOOL_NAME)
    yield from text.take(">")
    if name not in tools:
        raise NoCall
    if name not in text.types:
        text.types[name] = ToolTypes(tools[name])
    types = text.types[name]
    values: dict[str, str] = {}
    while True:
        yield from text.blanks()
        if (yield from text.take(PARAMETER, FUNCTION_END)) == FUNCTION_END:
            break
        key = yield from text.until(">")
        if "\n" in key:
            raise NoCall
        values[key] = json_of((yield from _value(text)), types.of_parameter(key))
    pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
    return Call(name, f"{{{', '.join(pairs)}}}")


def _value(text: CallText) -> Step[str]:
    """Read a value and its closing tag, which is one where another tag of the call follows."""
    value = yield from text.until(PARAMETER_END, PARAMETER, FUNCTION_END)
    end = "\r\n" if value.startswith("\r\n") else "\n"
    return value.removeprefix(end).removesuffix(end)


# ---- Types ---------------------------------------------------------------------------------------


def json_of(value: str, types: ValueTypes) -> str:
    """A value as JSON text, of a type that its schema allows.

    Args:
        value: as it was written.
        types: of the parameter.
    """
    kinds = types.kinds
    text = value.strip(BLANKS)
    if not kinds - {"string"} or value in types.texts:
        return json.dumps(value, ensure_ascii=False)
    word = _WORDS.get(text.lower())
    if word in kinds:
        return "null" if word == "null" else text.lower()
    integer = _INTEGER.fullmatch(text)
    try:
        found = json_value(text)  # numbers are texts there
    except NoCall:
        return json.dumps(value, ensure_ascii=False)
    if integer and "integer" in kinds:
        return integer[1]
    kind = "number" if _NUMBER.fullmatch(text) else KINDS[type(found)]
    return text if kind in kinds and kind != "string" else json.dumps(value, ensure_ascii=False)


# ---- Writing -------------------------------------------------------------------------------------

_NO_END = r"~/(?s:.*<\/parameter>.*)/"
_PLAIN = {
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "boolean": '"true" | "false"',
    "null": '"null"',
}
"""Values of these types as JSON has them, in Lark."""
_FORMATS = {
    "date": "[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "time": r"[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[^@ \t\r\n]+@[^@ \t\r\n]+",
    "ipv4": r"[0-9]{1,3}(\.[0-9]{1,3}){3}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}[Tt]{_FORMATS['time']}"
"""Of strings, as RFC 3339 and others write them; other formats are notes, as the schema says."""
_ENDS = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
ANYTHING = "(?s:.*)"
_END = r"/\n<\/parameter>\n/"


def xml_rules(tools: Sequence[OfferedTool], many: bool, special: Mapping[str, int]) -> str:
    """Lark rules, as `CallFormat.rules`. Parameters stand in the order of the schema; those that
    are not required may be left out.

    Raises:
        RequestError: a parameter's name cannot be written in a tag, or there is too much of them.
    """
    opening, closing = (
        f"<[{special[mark]}]>" if mark in special else json.dumps(mark)
        for mark in ("<tool_call>", "</tool_call>")
    )
    one = f'{opening} "\\n" call "\\n" {closing}'
    lines = [
        f"calls: {one} " + (f'("\\n" {one})*' if many else ""),
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
        f"TEXT: (/(?s:.*)/ & {_NO_END}) {_END}",
        r"ANY_NAME: /<parameter=[A-Za-z0-9_.-]{1,64}>\n/",
    ]
    size = 0
    for i, tool in enumerate(tools):
        types = ToolTypes(tool.parameters)
        properties, required = types.properties, types.required
        names = dict.fromkeys([*properties, *required])
        parts = [json.dumps(f"<function={tool.name}>\n")]
        for j, key in enumerate(names):
            if not key or ">" in key or "\n" in key:
                raise RequestError(
                    f"{tool.name} has a parameter {key!r}, which this model's form of calls "
                    "cannot write: rename it, without > and line breaks."
                )
            tag = json.dumps(f"{PARAMETER}{key}>\n", ensure_ascii=False)
            value = _value_rule(properties.get(key, True), types, f"VALUE_{i}_{j}", lines)
            parts.append(f"{tag} {value}" if key in required else f"({tag} {value})?")
            size += len(parts[-1])
            check_size("their grammar", size)  # each may have a copy of all definitions
        further = types.schema.get("additionalProperties", False)
        if not names and further is not False:
            parts.append(f"(ANY_NAME {_value_rule(further, types, f'VALUE_{i}', lines)})*")
        lines.append(f"call_{i}: {' '.join(parts)} {json.dumps(FUNCTION_END)}")
    return "\n".join(lines) + "\n"


def _value_rule(schema: Any, types: ToolTypes, name: str, lines: list[str]) -> str:
    """A value and its closing tag in Lark, by a terminal of this name where one is needed: a
    grammar may have few terminals and schemas, and a chat many tools."""
    own, found = types.target(schema), types.of_schema(schema)
    kinds, values = found.kinds, found.only
    if values and not any(isinstance(value, dict | list) for value in values):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {_END}"
    if kinds and kinds <= _PLAIN.keys() and schema.keys() <= {"type", *NOTES}:
        return f"({' | '.join(_PLAIN[kind] for kind in sorted(kinds))}) {_END}"
    if kinds and "string" not in kinds:
        root = types.root
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"%json {json.dumps(definitions | dict(schema))} {_END}"
    least, most = (own[key] if isinstance(own.get(key), int) else "" for key in LENGTHS)
    pattern, form = own.get("pattern"), _FORMATS.get(str(own.get("format")))
    if kinds != {"string"} or not (least or most != "" or pattern or form):
        return "TEXT"
    held = [f"/(?s:.{{{least or 0},{most}}})/", _NO_END]
    if form:
        held.append(f"/{form}/")
    if isinstance(pattern, str):
        begins, ends = pattern.startswith("^"), _ENDS.search(pattern) is not None
        inside = in_lark(pattern[begins : len(pattern) - ends])
        held.append(f"/{ANYTHING * (not begins)}({inside}){ANYTHING * (not ends)}/")
    lines.append(f"{name}: ({' & '.join(held)}) {_END}")
    return name


def xml_written(name: str, arguments: str) -> str:
    """A call as text; arguments that are no JSON object stand where parameters would."""
    try:
        given = json.loads(arguments)
    except ValueError:
        given = {"KEY": "VALUE"}
    lines = ["<tool_call>", f"<function={name}>"]
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"{PARAMETER}{key}>", text, PARAMETER_END]
    return "\n".join([*lines, FUNCTION_END, "</tool_call>"])
