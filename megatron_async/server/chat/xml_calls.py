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
from megatron_async.server.chat.call_text import BLANKS, CallText, NoCall, Step, json_value
from megatron_async.server.chat.thoughts import Special, in_lark, mark
from megatron_async.server.chat.tool_types import KINDS, ToolTypes, ValueTypes, alternatives
from megatron_async.text.grammar_limits import NOTES, check_size

XML_MARKS = ("<tool_call>", "<function=")
"""Qwen3-Coder sometimes leaves the outer tag out."""
PARAMETER, PARAMETER_END, FUNCTION_END = "<parameter=", "</parameter>", "</function>"

_INTEGER = re.compile(r"(-?\d+)(?:\.0+)?")
_NUMBER = re.compile(r"-?\d.*", re.DOTALL)
_WORDS = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}
"""Templates write True, False and None of Python's values."""
LENGTHS = ("minLength", "maxLength")
TEXT_LIMITS = (*LENGTHS, "pattern", "format")


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
    """A value as JSON text, of a type that its schema allows."""
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
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_OCTET, _HEX = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])", "[0-9a-fA-F]{1,4}"
_TIME_SPAN = "T([0-9]+S|[0-9]+M([0-9]+S)?|[0-9]+H([0-9]+M([0-9]+S)?)?)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_FORMATS = {
    "date": "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOUR_MINUTE})",
    "duration": "P([0-9]+W|([0-9]+D|[0-9]+M([0-9]+D)?|[0-9]+Y([0-9]+M([0-9]+D)?)?)"
    f"({_TIME_SPAN})?|{_TIME_SPAN})",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[^@ \t\r\n]+@[^@ \t\r\n]+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": f"({_HEX}:){{7}}{_HEX}|({_HEX}:){{1,7}}:|:(:{_HEX}){{1,7}}|::|"
    + "|".join(f"({_HEX}:){{1,{7 - n}}}(:{_HEX}){{1,{n}}}" for n in range(1, 7)),
    "uri": "[A-Za-z][A-Za-z0-9+.-]*:[!#-;=?-Z_a-z~%\\[\\]]+",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}[Tt]{_FORMATS['time']}"
"""Formats of strings that llguidance has, as RFC 3339, 3986, 4291 and others write them."""
_NEVER_HELD = ("not", "if", "$dynamicRef")
_NOT_HELD = (
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "unevaluatedProperties", *_NEVER_HELD,
)  # fmt: skip
"""Keywords that say what this form's grammar cannot hold: of a value, and of a tool's schema."""
_ENDS = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
ANYTHING = "(?s:.*)"
_END = r"/\n<\/parameter>\n/"


def xml_rules(tools: Sequence[OfferedTool], many: bool, special: Special) -> str:
    """Lark rules, as `CallFormat.rules`. Parameters stand in the order of the schema; those that
    are not required may be left out. What the grammar cannot hold is a RequestError."""
    opening, closing = mark("<tool_call>", special), mark("</tool_call>", special)
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
        _check_held(tool.parameters, types, tool.name, _NOT_HELD)
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
            where = f"the parameter {key!r} of {tool.name}"
            value = _value_rule(properties.get(key, True), types, f"VALUE_{i}_{j}", where, lines)
            parts.append(f"{tag} {value}" if key in required else f"({tag} {value})?")
            size += len(parts[-1])
            check_size("their grammar", size)  # each may have a copy of all definitions
        further = types.schema.get("additionalProperties", False)
        if not names and further is not False:
            value = _value_rule(further, types, f"VALUE_{i}", tool.name, lines)
            parts.append(f"(ANY_NAME {value})*")
        lines.append(f"call_{i}: {' '.join(parts)} {json.dumps(FUNCTION_END)}")
    return "\n".join(lines) + "\n"


def _value_rule(schema: Any, types: ToolTypes, name: str, where: str, lines: list[str]) -> str:
    """A value and its closing tag in Lark, by a terminal of this name where one is needed: a
    grammar may have few terminals and schemas, and a chat many tools."""
    _check_held(schema, types, where, _NEVER_HELD)
    branches = list(types.branches(schema))
    limited = [own for own in branches if not own.keys().isdisjoint(TEXT_LIMITS)]
    if limited and len(branches) > 1:
        joined = ("allOf" in own and len(alternatives(own)) > 1 for own in branches)
        if any(map(alternatives, limited)) or any(joined):
            raise _not_held(where, "limits of a text beside alternatives")
        leaves = [own for own in branches if not alternatives(own)]
        rules = (
            _value_rule(own, types, f"{name}_{i}", where, lines) for i, own in enumerate(leaves)
        )
        return f"({' | '.join(dict.fromkeys(rules))})"
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
    pattern, form = own.get("pattern"), own.get("format")
    if not limited or not kinds - {"string"} <= _PLAIN.keys():
        return "TEXT"
    if form is not None and form not in _FORMATS:
        raise _not_held(where, f"the format {str(form)[:50]!r} (served are {', '.join(_FORMATS)})")
    held = [f"/(?s:.{{{least or 0},{most}}})/", _NO_END]
    if form:
        held.append(f"/{_FORMATS[form]}/")
    if isinstance(pattern, str):
        begins, ends = pattern.startswith("^"), _ENDS.search(pattern) is not None
        inside = in_lark(pattern[begins : len(pattern) - ends])
        held.append(f"/{ANYTHING * (not begins)}({inside}){ANYTHING * (not ends)}/")
    lines.append(f"{name}: ({' & '.join(held)}) {_END}")
    plain = (f"({_PLAIN[kind]}) {_END}" for kind in sorted(kinds - {"string"}))
    return f"({' | '.join([name, *plain])})"


def _check_held(schema: Any, types: ToolTypes, where: str, keys: Sequence[str]) -> None:
    """Raise RequestError for one of these keywords in a schema or its alternatives, for a reference
    to nothing, and for a value that there cannot be."""
    if schema is False:
        raise _not_held(where, "false as its schema")
    if isinstance(schema, Mapping) and "$ref" in schema:
        for key in schema.keys() & {*TEXT_LIMITS, "enum", "const"}:
            raise _not_held(where, f"{key} beside a $ref")
    for own in types.branches(schema):
        for key in keys:
            if key in own:
                raise _not_held(where, key)
    for path in types.lost:
        raise _not_held(where, f"the $ref {path[:60]!r} to nothing in the tool's schema")


def _not_held(where: str, what: str) -> RequestError:
    return RequestError(
        f"{where} has {what}, which this model's form of calls cannot hold: leave it out."
    )


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
