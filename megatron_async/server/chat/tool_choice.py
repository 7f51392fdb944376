"""`tool_plan`: which tools the model is told of, and whether it must call one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_async.errors import RequestError
from megatron_async.server.chat.answer_pieces import OfferedTool
from megatron_async.server.chat.call_formats import CallFormat
from megatron_async.server.fields.chat_request import ChatRequest, FunctionTool, NamedTool
from megatron_async.server.fields.refusal import Refusal, not_allowed
from megatron_async.text.grammar_limits import check_schema, check_size
from megatron_async.text.schema_numbers import exact_numbers

if TYPE_CHECKING:
    from megatron_async.server.chat.chat_format import ChatFormat

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
TELL_OF_OTHERS = {
    "additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties", "allOf",
    "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas",
}  # fmt: skip
"""Keywords of a schema that may want members beside its `properties`."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The result of `tools` and `tool_choice`.

    Attributes:
        tools: for the template, as OpenAI writes them; None: it is told of none.
        format: finds calls in the answer; None: text is text.
        offered: tools that may be called: name -> JSON schema of the arguments.
        grammar: of nothing but calls, that the answer is held to, in llguidance's Lark; None: it is
            free.
        is_named: one function by its name must be called.
    """

    tools: list[dict[str, Any]] | None = None
    format: CallFormat | None = None
    offered: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grammar: str | None = None
    is_named: bool = False


def tool_plan(request: ChatRequest, chat: ChatFormat, most: int) -> ToolPlan:
    """Read the tools of a request.

    Args:
        request: its `tools`, `tool_choice` and `parallel_tool_calls`.
        chat: of the model.
        most: tools that are allowed.

    Raises:
        Refusal: a tool has no name, or the choice names none, or there are too many.
    """
    tools, choice = request.tools, request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise Refusal("tool_choice was given without tools: give tools.", param="tool_choice")
        return ToolPlan()
    if len(tools) > most:
        raise Refusal(f"tools has {len(tools)} tools: at most {most} are served.", param="tools")
    functions = [_checked(tool.type, tool.function, i) for i, tool in enumerate(tools)]
    told = [
        {"type": "function", "function": msgspec.to_builtins(function)} for function in functions
    ]
    for tool in told:
        tool["function"] = {key: v for key, v in tool["function"].items() if v is not None}
    offered = [OfferedTool(f.name, f.parameters or NO_PARAMETERS) for f in functions]
    if choice == "none":
        return ToolPlan(told)
    many = request.parallel_tool_calls is not False
    schemas = {tool.name: tool.parameters for tool in offered}
    if choice is None or choice == "auto":
        return ToolPlan(told, chat.tool_format, schemas)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        offered = [tool for tool in offered if tool.name == name][:1]
        if not offered:
            raise not_allowed("tool_choice", name, "the name of one of the tools")
        grammar = _grammar(chat, offered, False)
        return ToolPlan(told, chat.tool_format, {name: schemas[name]}, grammar, True)
    if choice != "required":
        raise not_allowed("tool_choice", choice, '"none", "auto", "required" or a named function')
    return ToolPlan(told, chat.tool_format, schemas, _grammar(chat, offered, many))


def _grammar(chat: ChatFormat, offered: Sequence[OfferedTool], many: bool) -> str:
    try:
        offered = [
            OfferedTool(one.name, _only_named(exact_numbers(one.parameters))) for one in offered
        ]
        grammar = "start: calls\n" + chat.tool_format.rules(offered, many, chat.special)
        check_size("tools", len(grammar))
    except RequestError as error:
        raise Refusal(str(error), param="tools") from error
    return grammar


def _only_named(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without arguments that it does not name, where it says nothing of them: the
    function has none, and a model that is held to a call may write one after another."""
    named, required = schema.get("properties"), schema.get("required", [])
    if (
        not isinstance(named, dict)
        or not isinstance(required, list)
        or not TELL_OF_OTHERS.isdisjoint(schema)
        or not all(isinstance(name, str) and name in named for name in required)
    ):
        return schema
    return {**schema, "additionalProperties": False}


def _checked(kind: str, function: FunctionTool | None, place: int) -> FunctionTool:
    if kind != "function" or function is None:
        raise Refusal(
            f"tools[{place}] is no function: only tools of type function are served.",
            param="tools",
        )
    if not _NAME.fullmatch(function.name):
        allowed = "1 to 64 of the characters A-Z a-z 0-9 _ . -"
        raise not_allowed(f"tools[{place}].function.name", function.name, allowed)
    try:
        check_schema(function.parameters or NO_PARAMETERS)
    except RequestError as error:
        raise Refusal(str(error), param="tools") from error
    return function
