"""From a request's fields to what the engine is asked: `ask_completion` and `ask_chat`."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Any

from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.server.fields.asked import AnswerStyle, Asked, AskedChoice, Caller
from megatron_async.server.fields.chat_request import ChatRequest
from megatron_async.server.fields.completion_request import CompletionRequest
from megatron_async.server.fields.prompts import check_prompt, completion_prompts, cut_front
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.sampling import (
    check,
    log_prob_count,
    max_tokens_of,
    priority_of,
    sampling_params,
    seed_of,
)
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.server.fields.shared_fields import SharedFields
from megatron_async.text.structured_output import StructuredOutput

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's."""
NOT_SERVED = (
    "best_of", "use_beam_search", "prompt_embeds", "allowed_token_ids", "thinking_token_budget",
    "lora_request", "lora_path", "suffix",
)  # fmt: skip


def ask_completion(request: CompletionRequest, served: ServedModel, caller: Caller) -> Asked:
    """What a request for completions asks the engine.

    Raises:
        Refusal: naming the field that is wrong.
    """
    model = _begin(request, served)
    prompts = completion_prompts(request, served)
    most = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    is_scoring = most == 0 and bool(request.echo)
    if not is_scoring:
        max_tokens_of("max_tokens", most)
    style = _style(request, "completions", model)
    top_n = log_prob_count("logprobs", request.logprobs)
    style = replace(style, top_n=top_n, echo=bool(request.echo), is_scoring=is_scoring)
    if is_scoring and style.is_stream:
        raise Refusal("max_tokens=0 has nothing to stream: use stream=false.", param="stream")
    params = sampling_params(request, served, caller, max(most, 1), _structured(request))
    params.echo = style.echo
    _ask_log_probs(params, top_n, style)
    return _asked(request, served, caller, prompts, params, style)


async def ask_chat(request: ChatRequest, served: ServedModel, caller: Caller) -> Asked:
    """What a request for a chat's next message asks the engine.

    Raises:
        Refusal: naming the field that is wrong.
    """
    model = _begin(request, served)
    text = served.chat.render(request)
    ids = cut_front(
        served.tokenize(text, False, "messages"), request.truncate_prompt_tokens, served
    )
    check_prompt(ids, served, "messages")
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    most = max_tokens_of(name, getattr(request, name))
    style = _style(request, "chat", model)
    top_n = None
    if request.logprobs:
        top_n = log_prob_count("top_logprobs", request.top_logprobs or 0)
    elif request.top_logprobs:
        raise Refusal("top_logprobs needs logprobs=true.", param="top_logprobs")
    style = replace(style, top_n=top_n)
    params = sampling_params(request, served, caller, most, _structured(request))
    _ask_log_probs(params, top_n, style)
    return _asked(request, served, caller, [ids], params, style)


def _begin(request: SharedFields, served: ServedModel) -> str:
    """The model's name for the answer; what is not served is refused."""
    name = served.name(request.model)
    for field in NOT_SERVED:
        if getattr(request, field, None):
            raise Refusal(f"{field} is not served: leave it out.", param=field)
    if request.prompt_logprobs is not None:
        raise Refusal(
            "prompt_logprobs is not served: use echo with logprobs of /v1/completions.",
            param="prompt_logprobs",
        )
    return name


def _style(request: SharedFields, endpoint: Any, model: str) -> AnswerStyle:
    options = request.stream_options
    if options is not None and not request.stream:
        raise Refusal("stream_options needs stream=true.", param="stream_options")
    continuous = bool(options and options.continuous_usage_stats)
    return AnswerStyle(
        endpoint=endpoint,
        id=("chatcmpl-" if endpoint == "chat" else "cmpl-") + secrets.token_hex(16),
        created=int(time.time()),
        model=model,
        is_stream=bool(request.stream),
        include_usage=bool(options and options.include_usage) or continuous,
        continuous_usage=continuous,
        gives_token_ids=bool(request.return_token_ids),
        names_by_id=bool(request.return_tokens_as_token_ids),
    )


def _ask_log_probs(params: SamplingParams, top_n: int | None, style: AnswerStyle) -> None:
    params.return_log_probs = top_n is not None
    params.top_n_logprobs = top_n or 0
    params.skip_prompt_log_probs = not style.echo


def _asked(
    request: SharedFields,
    served: ServedModel,
    caller: Caller,
    prompts: list[Any],
    params: SamplingParams,
    style: AnswerStyle,
) -> Asked:
    n = 1 if request.n is None else request.n
    most = served.limits.choices
    if n < 1 or n * len(prompts) > most:
        raise Refusal(
            f"n={n} for {len(prompts)} prompts is not allowed: n is 1 or more, and n times the "
            f"prompts at most {most}.", param="n",
        )  # fmt: skip
    values = sum(map(len, prompts)) * (1 + params.top_n_logprobs) * n
    if params.return_log_probs and style.echo and values > served.limits.log_prob_values:
        raise Refusal(
            f"the prompts' log probs are {values} numbers, and {served.limits.log_prob_values} are "
            "allowed in one request: send fewer prompts.", param="logprobs",
        )  # fmt: skip
    choices = []
    for index in range(n * len(prompts)):
        own = params.copy()
        own.seed = seed_of(request, index % n)
        check(own, served)
        choices.append(AskedChoice(index, index // n, own))
    return Asked(prompts, choices, priority_of(request, served, caller), style)


def _structured(request: SharedFields) -> StructuredOutput | None:
    """What the text is held to."""
    wanted, given = request.response_format, request.structured_outputs
    if wanted is not None and wanted.type != "text":
        if given is not None:
            raise Refusal(
                "response_format and structured_outputs were both given: give one of them.",
                param="structured_outputs",
            )
        if wanted.type == "json_object":
            return StructuredOutput(json_schema={"type": "object"})
        schema = None if wanted.json_schema is None else wanted.json_schema.schema
        if wanted.type != "json_schema" or not isinstance(schema, dict):
            raise Refusal(
                f"response_format of type {wanted.type[:50]!r} is not served: use text, "
                "json_object, or json_schema with a schema.", param="response_format",
            )  # fmt: skip
        return StructuredOutput(json_schema=schema)
    if given is None:
        return None
    if given.structural_tag is not None:
        raise Refusal("structural_tag is not served: leave it out.", param="structured_outputs")
    kinds: dict[str, Any] = {
        "json_schema": given.json, "regex": given.regex, "grammar": given.grammar,
        "choice": given.choice,
    }  # fmt: skip
    if given.json_object:
        kinds["json_schema"] = {"type": "object"}
    return StructuredOutput(**kinds)
