"""`ChatRequest`: the body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_async.server.fields.shared_fields import SharedFields


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function that the model called; arguments are JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A call in a message of the assistant."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, kw_only=True):
    """A message of a chat; a content of several parts is a list of objects with a `type`."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool; only functions are served."""

    function: FunctionTool | None = None
    type: str = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    """The function of a `tool_choice`."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """A `tool_choice` that names a function."""

    function: NamedFunction
    type: str = "function"


class ChatRequest(SharedFields, kw_only=True):
    """A request for an answer in a chat.

    Attributes:
        messages: the chat so far.
        max_completion_tokens: OpenAI's newer name of `max_tokens`; it wins.
        logprobs: give the log prob of each token.
        top_logprobs: and this many likeliest ones beside it.
        tools: functions that the model may call.
        tool_choice: "none", "auto", "required" or one of them by name.
        parallel_tool_calls: False: one call at most.
        chat_template_kwargs: further variables of the template; only those of an allowlist.
        continue_final_message: the answer continues the last message.
        include_reasoning: False: thoughts are left out.
    """

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    modalities: list[str] | None = None
