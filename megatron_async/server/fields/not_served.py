"""Fields that change an answer, and which an endpoint may not serve: refused by name there.

The names are those of OpenAI's specification (openai-openapi: CreateCompletionRequest,
CreateChatCompletionRequest, CreateResponse), of Anthropic's client (types/message_create_params.py)
and of vLLM 0.25's request classes. An endpoint serves those that the struct of its body declares.
What is on no list is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_async.server.fields.refusal import Refusal

NOT_HERE = "this endpoint does not have it: leave it out"
IN_MESSAGES = "this endpoint does not have it: put it before the prompt, or into messages"
NO_MEDIA = "images, audio and video are not served: leave it out"
NO_LORA = "LoRA adapters are not served: leave it out"
NO_STORE = "this server stores no responses: "
USE_STRUCTURED = "it is not served: use structured_outputs"

_OF_CHATS = (
    "documents", "reasoning", "reasoning_effort", "thinking", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "truncation",
)  # fmt: skip
_ELSEWHERE = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences",
    "logit_bias", "bad_words", "logprobs", "top_logprobs", "prompt_logprobs", "response_format",
    "structured_outputs", "text", "output_config", "output_format", "echo", "skip_special_tokens",
    "include_stop_str_in_output", "include_reasoning", "return_token_ids",
    "return_tokens_as_token_ids", "return_weight_versions", "max_version_lag",
    "request_id",
)  # fmt: skip
"""Fields that other endpoints have."""
_OLDER = (
    "allowed_token_ids", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_json_object", "guided_whitespace_pattern",
)  # fmt: skip
OF_PROMPTS: Mapping[str, str] = {
    "messages": NOT_HERE,
    "prompt": NOT_HERE,
    "input": NOT_HERE,
    "system": IN_MESSAGES,
    "instructions": IN_MESSAGES,
    "tools": "tools are for chats: send messages to /v1/chat/completions",
    **dict.fromkeys(_OF_CHATS, NOT_HERE),
    "chat_template": "templates of requests are not served: the model's own is used",
    "functions": "the old form of tools is not served: use tools",
    "prompt_embeds": "embeddings as prompts are not served: send text or token ids",
    "previous_response_id": NO_STORE + "send the whole conversation as input",
    "conversation": "this server stores no conversations: send the whole conversation as input",
    "context_management": "it is not served: leave it out, and send what is to be read",
    "mm_processor_kwargs": NO_MEDIA,
    "media_io_kwargs": NO_MEDIA,
    "mcp_servers": "this server calls nothing: leave it out, and run tools in the client",
    "container": "this server runs no code: leave it out",
    "web_search_options": "the server fetches nothing: leave it out",
}
"""Field that changes a prompt -> what to do."""
OF_ANSWERS: Mapping[str, str] = {
    "n": "this endpoint gives one answer: send several requests",
    **dict.fromkeys(_ELSEWHERE, NOT_HERE),
    "use_beam_search": "beam search is not served: leave it out",
    "length_penalty": "it belongs to beam search, which is not served: leave it out",
    **dict.fromkeys(_OLDER, USE_STRUCTURED),
    "guided_decoding_backend": "there is one backend of grammars here: leave it out",
    "structural_tag": USE_STRUCTURED,
    "thinking_token_budget": "it is not served: leave it out, and limit max_tokens",
    "repetition_detection": "it is not served: use repetition_penalty",
    "logits_processors": "code of requests is not run: leave it out",
    "kv_transfer_params": "KV caches of other servers are not served: leave it out",
    "vllm_xargs": "arguments of vLLM's plugins are not served: leave it out",
    "spaces_between_special_tokens": "special tokens stand as they are: leave it out",
    "lora_request": NO_LORA,
    "lora_path": NO_LORA,
    "streaming_interval": "tokens are written as they come: leave it out, or set it to 1",
    "suffix": "text behind the completion is not served: leave it out",
    "audio": NO_MEDIA,
    "function_call": "the old form of tool_choice is not served: use tool_choice",
    "verbosity": "no model here has it: ask for long or short answers in a system message",
    "store": NO_STORE + "leave it out, or set it to false",
    "background": "responses are not made in the background: leave it out, and use stream",
}
"""Field that changes an answer in another way -> what to do."""
KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""Anthropic's edit of a context that takes nothing out: Claude Code sends it in every request."""
NEUTRAL: Mapping[str, Any] = {
    "n": 1, "length_penalty": 1, "streaming_interval": 1, "verbosity": "medium",
    "spaces_between_special_tokens": True,
    "skip_special_tokens": True, "include_reasoning": True, "add_generation_prompt": True,
    "truncation": "disabled", "truncation_side": "left", "context_management": KEEPS_ALL,
}  # fmt: skip
"""Values that ask for what is done anyway. Null, false, 0 and what is empty count as not given."""
ZERO_ASKS = ("max_version_lag",)
"""But 0 of these asks for most: for no newer weights."""
ONE_THING = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    ("messages", "prompt", "input"),
    ("stop", "stop_sequences"),
    ("reasoning_effort", "reasoning", "output_config"),
    ("response_format", "text", "output_config"),
)
"""Names of one thing: an error for another endpoint's name tells this endpoint's."""

REMEDIES = {**OF_PROMPTS, **OF_ANSWERS}

if TYPE_CHECKING:

    class KnownFields(msgspec.Struct, kw_only=True):
        """All of these fields, of any type; a body's struct declares again what it serves."""

else:
    KnownFields = msgspec.defstruct(
        "KnownFields", [(name, Any, None) for name in REMEDIES], kw_only=True
    )


@cache
def not_served_by(kind: type[msgspec.Struct], of_prompts: bool = False) -> tuple[str, ...]:
    """The listed fields that a body's struct does not declare itself. With `of_prompts`, those that
    change a prompt alone."""
    classes = kind.__mro__[: kind.__mro__.index(KnownFields)]
    served = {name for one in classes for name in one.__annotations__}
    return tuple(name for name in (OF_PROMPTS if of_prompts else REMEDIES) if name not in served)


@cache
def _values_of(kind: type[msgspec.Struct], of_prompts: bool) -> attrgetter[tuple[Any, ...]]:
    return attrgetter(*not_served_by(kind, of_prompts))


def refuse_what_is_not_served(request: KnownFields, of_prompts: bool = False) -> None:
    """Raise Refusal for the first field that asks for what its endpoint does not serve. With
    `of_prompts` only what changes its prompt counts, as nothing is generated."""
    kind = type(request)
    values = _values_of(kind, of_prompts)(request)
    if values.count(None) < len(values):
        for name, value in zip(not_served_by(kind, of_prompts), values, strict=True):
            is_given = value or (type(value) is int and name in ZERO_ASKS)
            if is_given and (name not in NEUTRAL or value != NEUTRAL[name]):
                raise Refusal(f"{name} was given, and {_remedy(name, kind)}.", param=name)


def _remedy(name: str, kind: type[msgspec.Struct]) -> str:
    refused = not_served_by(kind)
    for names in ONE_THING:
        for other in names if name in names else ():
            if other in kind.__struct_fields__ and other not in refused:
                return f"this endpoint calls it {other}: use that"
    return REMEDIES[name]
