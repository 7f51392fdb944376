"""`CompletionRequest` and `ChatRequest`: bodies with OpenAI's fields and vLLM's.

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


class CommonFields(KnownFields, kw_only=True):
    """Fields that every protocol takes by these names; None is the default, as null is in JSON.
    Other fields that would change the answer are refused by name (`not_served.py`)."""

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class SharedFields(CommonFields, kw_only=True):
    """Fields of completions and chats."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    max_version_lag: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    truncation_side: str | None = None
    request_id: str | None = None


class ExtraFields(CommonFields, kw_only=True):
    """Fields of `ChatRequest` that protocols without a name for them take by ours."""

    chat_template_kwargs: dict[str, Any] | None = None


def extra_fields(request: ExtraFields, *further: str) -> dict[str, Any]:
    """The values of these fields and of `further` ones of the same names, as keyword arguments of
    `ChatRequest`."""
    names = (*CommonFields.__annotations__, "chat_template_kwargs", *further)
    return {name: getattr(request, name) for name in names}


class CompletionRequest(SharedFields, kw_only=True):
    """A request for completions.

    Attributes:
        prompt: one text, several, token ids, or several lists of them.
        logprobs: the log prob of each token, and this many likeliest ones beside it.
        max_completion_tokens: another name of `max_tokens`, which wins.
    """

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    max_completion_tokens: int | None = None


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
    """A message of a chat; a content of several parts is a list of objects with a `type`.

    Attributes:
        prompt_token_ids, generation_token_ids: of an earlier answer of Megatron-Core's server, as
            JSON: read there alone (`prompts.with_earlier_tokens`).
    """

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    prompt_token_ids: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    generation_token_ids: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


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
        add_BOS, prevent_retokenization, return_raw_text, return_tokenized_data: of Megatron-Core's
            server (`ServedModel.as_megatron`); no effect at ours.
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
    add_BOS: bool | None = None
    prevent_retokenization: bool | None = None
    return_raw_text: bool | None = None
    return_tokenized_data: bool | None = None
