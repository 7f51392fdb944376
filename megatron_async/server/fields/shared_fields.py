"""Fields that requests for completions and for chats share: OpenAI's and vLLM's.

Names were counted in vLLM 0.25's request classes and in OpenAI's specification.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_async.server.fields.not_served import KnownFields


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream beside its text.

    Attributes:
        include_usage: a last event with the numbers of tokens.
        continuous_usage_stats: with it the numbers so far in every event (vLLM's).
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """The `json_schema` of a response format."""

    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's response format: "text", "json_object" or "json_schema"; llama.cpp's clients put
    the `schema` beside the type."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of the first five; `grammar` is llguidance's Lark. The last
    three are refused by name."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None


class SharedFields(KnownFields, kw_only=True):
    """Fields of both endpoints; None is the default, as null is in JSON. Other fields that would
    change the answer are refused by name (`not_served.py`)."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    best_of: int | None = None
    truncation_side: str | None = None
    request_id: str | None = None
