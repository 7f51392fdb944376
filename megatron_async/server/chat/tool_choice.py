"""`tool_plan`: which tools the model is told of, and whether it must call one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_async.errors import RequestError
from megatron_async.server.chat.answer_pieces import TOOL_NAME, OfferedTool
from megatron_async.server.chat.call_formats import CallFormat
from megatron_async.server.chat.thoughts import rule_of
from megatron_async.server.chat.tool_types import ToolTypes
from megatron_async.server.fields.refusal import Refusal, not_allowed, renamed
from megatron_async.server.fields.request_bodies import ChatRequest, FunctionTool, NamedTool
from megatron_async.text.grammar_limits import check_schema, check_size, check_width, exact_numbers
from megatron_async.text.structured_output import StructuredOutput

if TYPE_CHECKING:
    from megatron_async.server.chat.chat_format import ChatFormat

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
        grammar: that the answer is held to, in llguidance's Lark; None: it is free.
        only_calls: the grammar lets the answer be nothing but calls.
        is_named: one function by its name must be called.
    """

    tools: list[dict[str, Any]] | None = None
    format: CallFormat | None = None
    offered: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grammar: str | None = None
    only_calls: bool = False
    is_named: bool = False


NO_TOOLS = ToolPlan()


def tool_plan(
    request: ChatRequest, chat: ChatFormat, most: int, wanted: StructuredOutput | None = None
) -> ToolPlan:
    """Read the tools of a request. An answer that calls nothing has the format `wanted`; None: it
    is free."""
    tools, choice = request.tools, request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise Refusal("tool_choice was given without tools: give tools.", param="tool_choice")
        return NO_TOOLS
    if len(tools) > most:
        raise Refusal(f"tools has {len(tools)} tools: at most {most} are served.", param="tools")
    functions = [_checked(tool.type, tool.function, i) for i, tool in enumerate(tools)]
    told = [
        {"type": "function", "function": msgspec.to_builtins(function)} for function in functions
    ]
    for tool in told:
        tool["function"] = {key: v for key, v in tool["function"].items() if v is not None}
    offered = [OfferedTool(f.name, f.parameters or NO_PARAMETERS) for f in functions]
    schemas = {tool.name: tool.parameters for tool in offered}
    if len(schemas) < len(offered):
        raise Refusal("tools has two functions of one name: rename one of them.", param="tools")
    if choice == "none":
        return ToolPlan(told)
    many = request.parallel_tool_calls is not False
    plan = ToolPlan(told, chat.tool_format, schemas)
    if choice is None or choice == "auto":
        if wanted is not None:
            return replace(plan, grammar=_grammar(chat, offered, many, wanted))
        if any(function.strict for function in functions):
            return replace(plan, grammar=_grammar(chat, offered, many, is_free=True))
        return plan
    if wanted is not None:
        raise Refusal(
            "a forced tool call and a response format exclude each other: set tool_choice to "
            "auto or none, or leave the format out.", param="tool_choice",
        )  # fmt: skip
    plan = replace(plan, only_calls=True)
    if isinstance(choice, NamedTool):
        if choice.type != "function":
            raise not_allowed("tool_choice.type", choice.type, '"function"')
        name = choice.function.name
        offered = [tool for tool in offered if tool.name == name]
        if not offered:
            raise not_allowed("tool_choice", name, "the name of one of the tools")
        grammar = _grammar(chat, offered, False)
        return replace(plan, offered={name: schemas[name]}, grammar=grammar, is_named=True)
    if choice != "required":
        raise not_allowed("tool_choice", choice, '"none", "auto", "required" or a named function')
    return replace(plan, grammar=_grammar(chat, offered, many))


def _grammar(
    chat: ChatFormat,
    offered: Sequence[OfferedTool],
    many: bool,
    wanted: StructuredOutput | None = None,
    is_free: bool = False,
) -> str:
    """The grammar of calls, or of what is wanted instead of them; free: of text before them."""
    form = chat.tool_format
    try:
        offered = [OfferedTool(one.name, _held(one)) for one in offered]
        if is_free:
            grammar = form.rules_behind_text(offered, many, chat.special)
        else:
            rules = form.rules(offered, many, chat.special)
            other = "" if wanted is None else form.answer_rules(rule_of(wanted), chat.special)
            grammar = f"start: calls{' | wanted' * bool(other)}\n{rules}{other}"
        check_size("their grammar", len(grammar))
    except RequestError as error:
        raise Refusal(f"tools: {error}", param="tools") from error
    return grammar


def _held(tool: OfferedTool) -> dict[str, Any]:
    """The schema that a tool's arguments are held to."""
    with _told_of(tool.name):
        check_width(tool.parameters)
        # Arguments are objects, whether a schema says so or not.
        return _only_named(exact_numbers({**tool.parameters, "type": "object"}))


@contextmanager
def _told_of(name: str) -> Iterator[None]:
    """Errors of schemas tell whose parameters they are of."""
    try:
        yield
    except RequestError as error:
        raise RequestError(renamed(str(error), {"json_schema": f"the schema of {name}"})) from error


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
            f"tools[{place}] is no function: only tools of type function are served.", param="tools"
        )
    if not TOOL_NAME.fullmatch(function.name):
        allowed = "1 to 128 of the characters A-Z a-z 0-9 _ . -"
        raise not_allowed(f"tools[{place}].function.name", function.name, allowed)
    parameters = function.parameters or NO_PARAMETERS
    try:
        with _told_of(function.name):
            check_schema(parameters)
    except RequestError as error:
        raise Refusal(f"tools: {error}", param="tools") from error
    kinds = ToolTypes({}).of_schema({"type": parameters.get("type") or "object"}).kinds
    if "object" not in kinds:
        name = f"tools[{place}].function.parameters.type"
        raise not_allowed(name, parameters["type"], '"object": arguments have names')
    return function
