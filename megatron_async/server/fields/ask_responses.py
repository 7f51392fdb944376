"""`ask_responses`: of /v1/responses the request becomes a `ChatRequest`, and is asked as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from megatron_async.server.chat.messages import ROLE, arguments_of, text_of
from megatron_async.server.fields.ask import ask_chat
from megatron_async.server.fields.asked import Asked, Caller
from megatron_async.server.fields.not_served import REMEDIES, refuse_what_is_not_served
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


class ResponseTextFormat(msgspec.Struct, kw_only=True):
    """The form of the text: "text", "json_object", or "json_schema" with its schema."""

    type: str = "text"
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseText(msgspec.Struct, kw_only=True):
    """Options of the text."""

    format: ResponseTextFormat | None = None
    verbosity: str | None = None


class ResponseReasoning(msgspec.Struct, kw_only=True):
    """Options of reasoning. Thoughts are sent as they are, never as a summary."""

    effort: str | None = None
    summary: str | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A tool. Served are those of type "function", also in a group of type "namespace"."""

    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ResponseTool] | None = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    """A `tool_choice` that names a function."""

    type: str = "function"
    name: str | None = None


class ResponsesRequest(ExtraFields, kw_only=True):
    """A request for a response.

    Attributes:
        input: a text of the user, or items: messages, calls and their outputs, reasoning.
        instructions: a system message before all others.
        max_output_tokens: thoughts included; None: as many as fit.
        include: "message.output_text.logprobs" asks for log probs; other names add nothing here.
        top_logprobs: how many of the likeliest tokens beside each.
        metadata: repeated in the answer.
        stop: texts that end the answer; vLLM's, not OpenAI's.
        truncation: only "disabled" is served.
    """

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None


def input_messages(
    given: str | Sequence[dict[str, Any]], instructions: str | None
) -> list[Message]:
    """The chat that a request describes.

    Items of the assistant that stand together (reasoning, text, calls) are one message, as chat
    templates write them. `instructions` become, or come before, the system message."""
    found: list[Message] = []
    if isinstance(given, str):
        found.append(Message(role="user", content=given))
    else:
        for place, item in enumerate(given):
            _add(found, item, f"input[{place}]")
    if instructions:
        if found and found[0].role in ("system", "developer"):
            instructions += f"\n\n{found.pop(0).content}"
        found.insert(0, Message(role="system", content=instructions))
    return found


def full_name(namespace: str | None, name: str) -> str:
    """What the model calls a function: its own name, behind its group's name if it is in one."""
    return f"{namespace}.{name}" if namespace else name


def _add(found: list[Message], item: dict[str, Any], param: str) -> None:
    match item.get("type", "message"):
        case "message":
            _add_message(found, item, param)
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if not isinstance(parts, list):
                raise Refusal(f"{param}.content must be a list of parts.", param=param)
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            thought = "\n".join(text for text in texts if isinstance(text, str))
            assistant = _assistant(found, begins=True)
            assistant.reasoning_content = (assistant.reasoning_content or "") + thought
        case "function_call":
            namespace = item.get("namespace")
            call = FunctionCall(
                name=full_name(
                    namespace if isinstance(namespace, str) else None, _text(item, "name", param)
                ),
                arguments=arguments_of(_text(item, "arguments", param), param),
            )
            assistant = _assistant(found)
            calls = assistant.tool_calls or []
            calls.append(MessageToolCall(function=call, id=_text(item, "call_id", param)))
            assistant.tool_calls = calls
        case "function_call_output":
            output = item.get("output")
            if not isinstance(output, str | list):
                raise Refusal(f"{param}.output must be a text or a list of parts.", param=param)
            text, call_id = text_of(output, f"{param}.output"), _text(item, "call_id", param)
            found.append(Message(role="tool", content=text, tool_call_id=call_id))
        case "additional_tools":
            pass  # `ask_responses` has read them
        case other:
            raise Refusal(
                f"{param} is of type {str(other)[:60]!r}, which is not served: send messages, "
                "reasoning, function calls and their outputs.", param=param,
            )  # fmt: skip


def _add_message(found: list[Message], item: dict[str, Any], param: str) -> None:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise Refusal(
            f"{param} has no role: give user, assistant, system or developer.", param=param
        )
    if not isinstance(content, str | list):
        raise Refusal(f"{param}.content must be a text or a list of parts.", param=param)
    text = text_of(content, f"{param}.content")
    if role != "assistant":
        found.append(Message(role=role, content=text))
        return
    assistant = _assistant(found)
    assistant.content = f"{assistant.content}\n{text}" if assistant.content else text


def _assistant(found: list[Message], begins: bool = False) -> Message:
    """The message of the assistant that is being put together; a new one where the last message
    is another's or, for what `begins` a turn, has calls or text already."""
    last = found[-1] if found else None
    is_done = last is None or last.role != "assistant"
    if last is not None and begins:
        is_done = is_done or bool(last.content or last.tool_calls)
    if is_done or last is None:
        last = Message(role="assistant")
        found.append(last)
    return last


def _text(item: dict[str, Any], name: str, param: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise Refusal(f"{param}.{name} is missing or no text: give it.", param=param)
    return value


FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "json_schema.schema": "schema",
    "reasoning_effort": "reasoning.effort",
    "function.parameters": "parameters",
    "function.name": "name",
}
"""Fields of chats -> of responses."""
LOG_PROBS = "message.output_text.logprobs"
"""The name in `include` that asks for log probs."""


def ask_responses(request: ResponsesRequest, served: ServedModel, caller: Caller) -> Asked:
    """What the engine is asked for a response."""
    refuse_what_is_not_served(request)
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise Refusal(f"text.verbosity was given, and {REMEDIES['verbosity']}.", param="text")
    if request.truncation not in (None, "disabled"):
        allowed = '"disabled": what does not fit is refused, never cut'
        raise not_allowed("truncation", request.truncation, allowed)
    wants_log_probs = request.top_logprobs is not None or LOG_PROBS in (request.include or ())
    tools = _all_tools(request)
    chat = ChatRequest(
        messages=input_messages(request.input, request.instructions),
        max_completion_tokens=checked_limit("max_output_tokens", request.max_output_tokens),
        logprobs=wants_log_probs,
        tools=_functions_of(tools),
        tool_choice=_choice(request),
        response_format=_format(request.text),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        **extra_fields(
            request, "model", "stream", "stop", "temperature", "top_p", "top_k", "top_logprobs",
            "parallel_tool_calls",
        ),
    )  # fmt: skip
    with told_at(FIELD_NAMES, [place for place, _, _ in _functions(tools)]):
        asked = ask_chat(chat, served, caller, "resp_", "max_output_tokens", FIELD_NAMES)
    style = msgspec.structs.replace(asked.style, repeated=_repeated(request, tools, asked))
    return msgspec.structs.replace(asked, style=style)


def _all_tools(request: ResponsesRequest) -> dict[str, ResponseTool]:
    """The tools of a request, and those that Codex adds by items of its input, by their places."""
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
    offers a web search in every request; `tools` of the answer has those that were offered."""
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
