"""`ask_responses`: of /v1/responses the request becomes a `ChatRequest`, and is asked as one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from megatron_async.server.fields.answer_length import checked_limit
from megatron_async.server.fields.ask import ID_BYTES, ask_chat
from megatron_async.server.fields.asked import Asked, Caller
from megatron_async.server.fields.chat_request import (
    ChatRequest,
    FunctionTool,
    NamedFunction,
    NamedTool,
    Tool,
)
from megatron_async.server.fields.extra_fields import extra_fields
from megatron_async.server.fields.not_served import REMEDIES, refuse_what_is_not_served
from megatron_async.server.fields.refusal import Refusal, not_allowed, told_at
from megatron_async.server.fields.responses_input import full_name, input_messages
from megatron_async.server.fields.responses_request import (
    ResponsesRequest,
    ResponseText,
    ResponseTool,
)
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.server.fields.shared_fields import JsonSchemaFormat, ResponseFormat

LOG_PROBS = "message.output_text.logprobs"
"""The name in `include` that asks for log probs."""


def ask_responses(request: ResponsesRequest, served: ServedModel, caller: Caller) -> Asked:
    """What the engine is asked for a response.

    Args:
        request: as it came.
        served: the model.
        caller: who sent it.

    Raises:
        Refusal: naming the field, its value and what is allowed.
    """
    refuse_what_is_not_served(request)
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise Refusal(f"text.verbosity was given, and {REMEDIES['verbosity']}.", param="text")
    if request.truncation not in (None, "disabled"):
        allowed = '"disabled": what does not fit is refused, never cut'
        raise not_allowed("truncation", request.truncation, allowed)
    top_n = request.top_logprobs
    wants_log_probs = top_n is not None or LOG_PROBS in (request.include or ())
    tools = _all_tools(request)
    chat = ChatRequest(
        model=request.model,
        messages=input_messages(request.input, request.instructions),
        stream=request.stream,
        stop=request.stop,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        max_completion_tokens=checked_limit("max_output_tokens", request.max_output_tokens),
        logprobs=wants_log_probs,
        top_logprobs=top_n,
        tools=_functions_of(tools),
        tool_choice=_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        **extra_fields(request),
    )
    with told_at("responses", [place for place, _, _ in _functions(tools)]):
        asked = ask_chat(chat, served, caller, "max_output_tokens")
    style = msgspec.structs.replace(
        asked.style,
        endpoint="responses",
        id="resp_" + secrets.token_hex(ID_BYTES),
        repeated=_repeated(request, tools, asked),
    )
    return msgspec.structs.replace(asked, style=style)


def _all_tools(request: ResponsesRequest) -> dict[str, ResponseTool]:
    """The tools of a request, and those that Codex adds by items of its input, by their places.

    Raises:
        Refusal: an item has none.
    """
    found = {f"tools[{i}]": tool for i, tool in enumerate(request.tools or ())}
    items = () if isinstance(request.input, str) else request.input
    for place, item in enumerate(items):
        if item.get("type") == "additional_tools":
            param = f"input[{place}].tools"
            try:
                added = msgspec.convert(item.get("tools"), list[ResponseTool])
            except msgspec.ValidationError as error:
                raise Refusal(f"{param}: {error}.", param=param) from error
            found |= {f"{param}[{i}]": tool for i, tool in enumerate(added)}
    return found


def _functions_of(tools: Mapping[str, ResponseTool]) -> list[Tool] | None:
    """The functions. Tools that only OpenAI's servers run are left out beside them, since Codex
    offers a web search in every request; `tools` of the answer has those that were offered.

    Raises:
        Refusal: there are no functions among them.
    """
    if not tools:
        return None
    found = [
        Tool(
            function=FunctionTool(
                name=name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
        )
        for _, name, tool in _functions(tools)
    ]
    if not found:
        place, first = next(iter(tools.items()))
        raise Refusal(
            f"{place} is of type {first.type[:60]!r}, and no other is a function: only "
            "tools of type function are served.", param="tools",
        )  # fmt: skip
    return found


def _functions(tools: Mapping[str, ResponseTool]) -> Iterator[tuple[str, str, ResponseTool]]:
    """Functions with their places and full names, also those of groups."""
    for place, group in tools.items():
        if group.type == "function":
            yield place, group.name or "", group
        elif group.type == "namespace":
            for i, tool in enumerate(group.tools or ()):
                if tool.type == "function":
                    yield f"{place}.tools[{i}]", full_name(group.name, tool.name or ""), tool


def _offered(tools: Mapping[str, ResponseTool]) -> list[dict[str, Any]]:
    """The tools that the model is told of, as they came."""
    found = []
    for tool in tools.values():
        if tool.type == "namespace":
            inner = [one for one in tool.tools or () if one.type == "function"]
            tool = msgspec.structs.replace(tool, tools=inner)
        if tool.type == "function" or tool.tools:
            told = msgspec.to_builtins(tool)
            found.append({name: value for name, value in told.items() if name != "tools" or value})
    return found


def _choice(request: ResponsesRequest) -> str | NamedTool | None:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type != "function" or choice.name is None:
        raise not_allowed(
            "tool_choice", choice.type[:60], '"none", "auto", "required" or a function with name'
        )
    return NamedTool(function=NamedFunction(name=choice.name))


def _format(text: ResponseText | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    given = text.format
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    schema = JsonSchemaFormat(name=given.name, schema=given.schema, strict=given.strict)
    return ResponseFormat(type=given.type, json_schema=schema)


def _repeated(
    request: ResponsesRequest, tools: Mapping[str, ResponseTool], asked: Asked
) -> dict[str, Any]:
    """Fields of the request that the answer repeats, with the values that were taken."""
    params = asked.choices[0].params
    told = msgspec.to_builtins(request)
    reasoning = told["reasoning"] or {}
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": (told["text"] or {}).get("format") or {"type": "text"}},
        "tool_choice": told["tool_choice"] or "auto",
        "tools": _offered(tools),
        "top_logprobs": asked.style.top_n or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
    }
