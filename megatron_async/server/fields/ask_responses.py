"""`ask_responses`: of /v1/responses the request becomes a `ChatRequest`, and is asked as one."""

from __future__ import annotations

import secrets
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
from megatron_async.server.fields.refusal import Refusal, not_allowed
from megatron_async.server.fields.responses_input import input_messages
from megatron_async.server.fields.responses_request import ResponsesRequest, ResponseText
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
        tools=_tools(request),
        tool_choice=_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        **extra_fields(request),
    )
    asked = ask_chat(chat, served, caller, "max_output_tokens")
    style = msgspec.structs.replace(
        asked.style,
        endpoint="responses",
        id="resp_" + secrets.token_hex(ID_BYTES),
        repeated=_repeated(request, asked),
    )
    return msgspec.structs.replace(asked, style=style)


def _tools(request: ResponsesRequest) -> list[Tool] | None:
    if request.tools is None:
        return None
    found = []
    for place, tool in enumerate(request.tools):
        if tool.type != "function":
            raise Refusal(
                f"tools[{place}] is of type {tool.type[:60]!r}: only tools of type function are "
                "served.", param="tools",
            )  # fmt: skip
        function = FunctionTool(
            name=tool.name or "",
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        found.append(Tool(function=function))
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


def _repeated(request: ResponsesRequest, asked: Asked) -> dict[str, Any]:
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
        "tools": told["tools"] or [],
        "top_logprobs": asked.style.top_n or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
    }
