"""`ask_messages`: of /v1/messages the request becomes a `ChatRequest`, and is asked as one."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from megatron_async.server.chat.tool_choice import tool_plan
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
from megatron_async.server.fields.messages_input import chat_messages
from megatron_async.server.fields.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    Thinking,
)
from megatron_async.server.fields.not_served import refuse_what_is_not_served
from megatron_async.server.fields.refusal import Refusal, not_allowed, told_at
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.server.fields.shared_fields import JsonSchemaFormat, ResponseFormat

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's word for a choice of tools -> OpenAI's."""


def ask_messages(request: MessagesRequest, served: ServedModel, caller: Caller) -> Asked:
    """What the engine is asked for a message.

    Args:
        request: as it came.
        served: the model.
        caller: who sent it.

    Raises:
        Refusal: naming the field, its value and what is allowed.
    """
    refuse_what_is_not_served(request)
    fields = _prompt_fields(request, served)
    fields |= {
        "stream": request.stream,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_completion_tokens": checked_limit("max_tokens", request.max_tokens),
        "response_format": _format(request),
    }
    with told_at("messages"):
        asked = ask_chat(ChatRequest(**fields), served, caller, "max_tokens")
    style = msgspec.structs.replace(
        asked.style, endpoint="messages", id="msg_" + secrets.token_hex(ID_BYTES)
    )
    return msgspec.structs.replace(asked, style=style)


def count_tokens(request: CountTokensRequest, served: ServedModel) -> int:
    """Tokens of the prompt that a request for a message would have.

    Raises:
        Refusal: the request could not be asked.
    """
    served.name(request.model)
    refuse_what_is_not_served(request, of_prompts=True)
    chat = ChatRequest(**_prompt_fields(request, served))
    with told_at("messages"):
        plan = tool_plan(chat, served.chat, served.limits.tools)
        return len(served.tokenize(served.chat.render(chat, plan.tools), False, "messages"))


def _prompt_fields(request: CountTokensRequest, served: ServedModel) -> dict[str, Any]:
    """Fields of the `ChatRequest` that the prompt is made of."""
    messages = chat_messages(request.messages, request.system)
    is_prefilled = bool(messages) and messages[-1].role == "assistant"
    choice = request.tool_choice
    one_call = choice is not None and choice.disable_parallel_tool_use
    config = request.output_config
    extra = extra_fields(request)
    kwargs = _thinking(request.thinking, served) | (extra["chat_template_kwargs"] or {})
    return extra | {
        "model": request.model,
        "messages": messages,
        # The answer goes on with a last message of the assistant.
        "continue_final_message": True if is_prefilled else None,
        "tools": _tools(request),
        "tool_choice": _choice(request),
        "parallel_tool_calls": False if one_call else None,
        "reasoning_effort": None if config is None else config.effort,
        "chat_template_kwargs": kwargs,
    }


def _tools(request: CountTokensRequest) -> list[Tool] | None:
    if request.tools is None:
        return None
    found = []
    for place, tool in enumerate(request.tools):
        if tool.type not in (None, "custom"):
            raise Refusal(
                f"tools[{place}] is of type {tool.type[:60]!r}, a tool of Anthropic's own: this "
                "server runs none; give tools with an input_schema, and run them in the client.",
                param="tools",
            )
        function = FunctionTool(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        found.append(Tool(function=function))
    return found


def _choice(request: CountTokensRequest) -> str | NamedTool | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type == "tool" and choice.name is not None:
        return NamedTool(function=NamedFunction(name=choice.name))
    if choice.type not in CHOICES:
        raise not_allowed(
            "tool_choice.type", choice.type[:60], '"auto", "any", "none", or "tool" with a name'
        )
    return CHOICES[choice.type]


def _thinking(thinking: Thinking | None, served: ServedModel) -> dict[str, Any]:
    """Variables of the chat template that turn thinking on or off. A budget is a target, as it is
    at Anthropic: the template is told of it, and `max_tokens` ends a thought too."""
    if thinking is None:
        return {}
    kind, budget = thinking.type, thinking.budget_tokens
    if kind not in ("enabled", "adaptive", "disabled"):
        raise not_allowed("thinking.type", kind[:60], '"enabled", "adaptive" or "disabled"')
    if kind == "enabled" and not served.chat.can_think:
        raise Refusal(
            "thinking is enabled, but this model's chat template has no thoughts: leave it out, or "
            'give {"type": "disabled"}.', param="thinking",
        )  # fmt: skip
    given: dict[str, Any] = dict.fromkeys(("enable_thinking", "thinking"), kind != "disabled")
    if budget is None:
        return given
    if kind != "enabled" or budget < 1:
        allowed = '1 or more, and only beside the type "enabled"'
        raise not_allowed("thinking.budget_tokens", budget, allowed)
    return {**given, "thinking_budget": budget}


def _format(request: MessagesRequest) -> ResponseFormat | None:
    given: OutputFormat | None = request.output_format
    if given is None and request.output_config is not None:
        given = request.output_config.format
    if given is None:
        return None
    if given.type != "json_schema":
        raise not_allowed("output_config.format.type", given.type[:60], '"json_schema"')
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given.schema))
