"""`ask_messages`: of /v1/messages the request becomes a `ChatRequest`, and is asked as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_async.server.chat.messages import text_of
from megatron_async.server.chat.tool_choice import tool_plan
from megatron_async.server.fields.ask import ask_chat
from megatron_async.server.fields.asked import Asked, Caller
from megatron_async.server.fields.not_served import refuse_what_is_not_served
from megatron_async.server.fields.prompts import checked_limit
from megatron_async.server.fields.refusal import Refusal, not_allowed, told_at
from megatron_async.server.fields.request_bodies import (
    ChatRequest,
    ExtraFields,
    FunctionCall,
    FunctionTool,
    JsonSchemaFormat,
    Message,
    MessageToolCall,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
    extra_fields,
)
from megatron_async.server.fields.served_model import ServedModel


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """A message: a text, or blocks (text, thinking, tool_use, tool_result)."""

    role: str
    content: str | list[dict[str, Any]]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool of the client; `input_schema` is a JSON schema. Tools of the server are refused."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    """Which tools may or must be called: "auto", "any", "none", or "tool" with a name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks: "enabled", "adaptive" or "disabled". Chat templates that have
    `thinking_budget` are told `budget_tokens`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The form of the text: "json_schema" with its schema."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """Options of the output."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(ExtraFields, kw_only=True):
    """The body of /v1/messages/count_tokens: what a message's prompt is made of."""

    messages: list[AnthropicMessage]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A request for a message.

    Attributes:
        max_tokens: of the answer, thoughts included.
        stop_sequences: texts that end it.
    """

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


FAILED = "Error: "
"""Stands before the text of a tool's result that has `is_error`: templates know no such mark."""


def chat_messages(
    given: Sequence[AnthropicMessage], system: str | Sequence[dict[str, Any]] | None
) -> list[Message]:
    """The chat that a request describes."""
    found: list[Message] = []
    if system:
        text = system if isinstance(system, str) else _joined(system, "system")
        found.append(Message(role="system", content=text))
    for place, message in enumerate(given):
        param = f"messages[{place}]"
        if message.role == "assistant":
            found.append(_of_assistant(message, param))
        elif message.role == "system" and found:
            # Claude Code's, where many templates take none: what is said to the model there.
            content = message.content
            text = content if isinstance(content, str) else _joined(content, param)
            role = "user"
            if found[-1].role in ("user", "system"):
                last = found.pop()
                role, text = last.role, f"{text_of(last.content, param)}\n{text}"
            found.append(Message(role=role, content=text))
        elif message.role in ("user", "system"):
            found += _of_user(message, param)
        else:
            raise not_allowed(f"{param}.role", message.role[:60], '"user" or "assistant"')
    return found


def _of_user(message: AnthropicMessage, param: str) -> list[Message]:
    """Results of tools are messages of their own, before and between what the user says."""
    content = message.content
    if isinstance(content, str):
        return [Message(role=message.role, content=content)]
    found: list[Message] = []
    said: list[str | dict[str, Any]] = []
    for block in content:
        if block.get("type") != "tool_result":
            said.append(_text_block(block, param))
            continue
        if said:
            found.append(Message(role=message.role, content=said))
            said = []
        result = block.get("content") or ""
        text = result if isinstance(result, str) else _joined(result, param)
        text = FAILED + text if block.get("is_error") else text
        number = _field(block, "tool_use_id", param)
        found.append(Message(role="tool", content=text, tool_call_id=number))
    if said or not found:
        found.append(Message(role=message.role, content=said))
    return found


def _of_assistant(message: AnthropicMessage, param: str) -> Message:
    content = message.content
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    texts: list[str | dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[MessageToolCall] = []
    for block in content:
        match block.get("type"):
            case "thinking":
                thoughts.append(_field(block, "thinking", param))
            case "redacted_thinking":
                continue  # another model's, which nobody here can read
            case "tool_use":
                given = block.get("input")
                if not isinstance(given, dict):
                    raise Refusal(f"{param}: a tool_use has no input object: give it.", param=param)
                function = FunctionCall(name=_field(block, "name", param), arguments=given)
                calls.append(MessageToolCall(function=function, id=_field(block, "id", param)))
            case _:
                texts.append(_text_block(block, param))
    return Message(
        role="assistant",
        content=texts or None,
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def _joined(blocks: Any, param: str) -> str:
    if not isinstance(blocks, list | tuple):
        raise Refusal(f"{param} must be a text or a list of blocks.", param=param)
    return "\n".join(str(_text_block(block, param)["text"]) for block in blocks)


def _text_block(block: Any, param: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise Refusal(
            f"{param} has a block of type {str(kind)[:60]!r} that is not served here: only text, "
            "thinking, tool_use (of the assistant) and tool_result (of the user) are; no images, "
            "no documents, and no URL is fetched.", param=param, code="unsupported_content",
        )  # fmt: skip
    return {"type": "text", "text": _field(block, "text", param)}


def _field(block: dict[str, Any], name: str, param: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise Refusal(f"{param}: a block has no {name}, or no text there: give it.", param=param)
    return value


FIELD_NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "json_schema.schema": "schema",
    "reasoning_effort": "output_config.effort",
    "function.parameters": "input_schema",
    "function.name": "name",
}
"""Fields of chats -> of messages."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's word for a choice of tools -> OpenAI's."""


def ask_messages(request: MessagesRequest, served: ServedModel, caller: Caller) -> Asked:
    """What the engine is asked for a message."""
    refuse_what_is_not_served(request)
    fields = _prompt_fields(request, served, "stream", "temperature", "top_p", "top_k")
    fields |= {
        "stop": request.stop_sequences,
        "max_completion_tokens": checked_limit("max_tokens", request.max_tokens),
        "response_format": _format(request),
    }
    with told_at(FIELD_NAMES):
        chat = ChatRequest(**fields)
        return ask_chat(chat, served, caller, "msg_", "max_tokens", FIELD_NAMES)


def count_tokens(request: CountTokensRequest, served: ServedModel) -> int:
    """Tokens of the prompt that a request for a message would have."""
    served.name(request.model)
    refuse_what_is_not_served(request, of_prompts=True)
    chat = ChatRequest(**_prompt_fields(request, served))
    with told_at(FIELD_NAMES):
        plan = tool_plan(chat, served.chat, served.limits.tools)
        return len(served.tokenize(served.chat.render(chat, plan.tools), False, "messages"))


def _prompt_fields(
    request: CountTokensRequest, served: ServedModel, *further: str
) -> dict[str, Any]:
    """Fields of the `ChatRequest` that the prompt is made of, and `further` ones of equal names."""
    messages = chat_messages(request.messages, request.system)
    is_prefilled = bool(messages) and messages[-1].role == "assistant"
    choice = request.tool_choice
    one_call = choice is not None and choice.disable_parallel_tool_use
    config = request.output_config
    extra = extra_fields(request, "model", *further)
    kwargs = _thinking(request.thinking, served) | (extra["chat_template_kwargs"] or {})
    return extra | {
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
