"""`MessagesRequest`: the body of /v1/messages, Anthropic's Messages API.

Names are those of Anthropic's own client (package `anthropic`, types/message_create_params.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_async.server.fields.extra_fields import ExtraFields


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
