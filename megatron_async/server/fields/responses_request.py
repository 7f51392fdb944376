"""`ResponsesRequest`: the body of /v1/responses, OpenAI's Responses API without a store.

Names are those of OpenAI's specification (openai-openapi, CreateResponse).
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_async.server.fields.extra_fields import ExtraFields


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
    """Options of reasoning. Thoughts are told as they are, never as a summary."""

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
