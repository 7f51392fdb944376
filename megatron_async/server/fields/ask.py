"""`ask_completion`, `ask_chat`: a request as the engine is asked it. Pure: no socket, no
clock but the date of the answer.

A long prompt takes a while to tokenize, and a long chat to render: the caller does that beside the
event loop (`is_quick`).
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Mapping, Sequence
from itertools import dropwhile

import msgspec

from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.server.chat.tool_choice import tool_plan
from megatron_async.server.fields.asked import (
    PLAIN,
    AnswerStyle,
    Asked,
    AskedChoice,
    Caller,
    ChatStyle,
)
from megatron_async.server.fields.formats import format_field, structured_output
from megatron_async.server.fields.not_served import refuse_what_is_not_served
from megatron_async.server.fields.prompts import (
    check_prompt,
    check_room,
    checked_limit,
    completion_prompts,
    cut,
    with_earlier_tokens,
)
from megatron_async.server.fields.refusal import Refusal, not_allowed
from megatron_async.server.fields.request_bodies import ChatRequest, CompletionRequest, SharedFields
from megatron_async.server.fields.sampling_fields import (
    check,
    log_prob_count,
    priority_of,
    sampling_params,
    seed_of,
)
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.text.structured_output import StructuredOutput

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat's is the rest of the context."""
QUICK_BYTES = 8 << 10
"""Bodies that are asked on an event loop: some 2,000 tokens, a few milliseconds."""
MEGATRON_FIELDS = ("generation_log_probs", "policy_epoch", "kv_cache_epoch", "num_evictions")
MEGATRON_IDS = ("prompt_token_ids", "generation_token_ids")
"""Fields of messages and completions of Megatron-Core's server."""
ID_BYTES = 12
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
"""What a request may call itself (vLLM's `request_id`): its answer's id ends with it."""


def is_quick(body: bytes) -> bool:
    """Whether asking takes no more than a few milliseconds, so that it may hold an event loop up.
    Others belong on a thread."""
    return len(body) <= QUICK_BYTES


def ask_completion(request: CompletionRequest, served: ServedModel, caller: Caller) -> Asked:
    """What the engine is asked for a completion.

    Raises:
        Refusal: naming the field, its value and what is allowed.
    """
    model, prompt_top_n = _check_style(request, served)
    top_n = log_prob_count("logprobs", request.logprobs)
    echo = bool(request.echo)
    is_scoring = request.max_tokens == 0 and (echo or request.prompt_logprobs is not None)
    name, given = _named_limit(request, "max_tokens", "max_completion_tokens")
    most = 0 if is_scoring else checked_limit(name, given)
    prompts = completion_prompts(request, most, served)
    most = check_room(name, most, prompts, served)
    most = COMPLETION_TOKENS if most is None else most
    params = sampling_params(request, served, caller, most, structured_output(request))
    params.echo = echo
    style = _style(
        request, "cmpl-", model, prompt_top_n, top_n, echo, is_scoring,
        format_field=format_field(request),
        megatron_fields=(*MEGATRON_FIELDS, *MEGATRON_IDS) if served.as_megatron else (),
    )  # fmt: skip
    return _asked(request, served, caller, params, prompts, style)


def ask_chat(
    request: ChatRequest,
    served: ServedModel,
    caller: Caller,
    prefix: str = "chatcmpl-",
    limit_name: str = "",
    field_names: Mapping[str, str] | None = None,
) -> Asked:
    """What the engine is asked for a chat; as `ask_completion`. An endpoint whose requests are
    translated has a `prefix` of its answers' ids, a name for `max_completion_tokens`, and names of
    other fields (`AnswerStyle.field_names`)."""
    model, prompt_top_n = _check_style(request, served)
    if set(request.modalities or ()) - {"text"}:
        raise Refusal("modalities: only text is served.", param="modalities")
    if request.top_logprobs and not request.logprobs:
        raise Refusal(
            f"top_logprobs={request.top_logprobs} was given without logprobs: set logprobs to "
            "true.",
            param="top_logprobs",
        )  # fmt: skip
    top_n = log_prob_count("top_logprobs", request.top_logprobs or 0) if request.logprobs else None
    name, given = _named_limit(request, "max_completion_tokens", "max_tokens")
    name = limit_name or name
    most = checked_limit(name, given)
    structured = wanted = structured_output(request)
    plan = tool_plan(request, served.chat, served.limits.tools, wanted)
    text = served.chat.render(request, plan.tools)
    ids = served.tokenize(text, request.add_special_tokens is True, "messages")
    if served.as_megatron and served.tokenizer is not None:
        ids = with_earlier_tokens(request, served, plan.tools, ids)
        bos = served.tokenizer.bos
        ids = list(dropwhile(lambda token: token == bos, ids))
        if request.add_BOS and bos is not None:
            ids = [bos, *ids]
    ids_cut = cut(ids, request, most, served)
    check_prompt(ids_cut, served, "messages")
    most = check_room(name, most, [ids_cut], served)
    if most is None and served.answer_tokens is not None:
        most = max(served.answer_tokens, request.min_tokens or 0)
    if plan.grammar is not None:
        structured = StructuredOutput(grammar=plan.grammar)
    if structured is not None and served.chat.thoughts:
        has_calls, has_format = plan.grammar is not None, wanted is not None
        structured = served.chat.behind_thought(structured, text, has_calls, has_format)
    params = sampling_params(request, served, caller, most, structured)
    chat = ChatStyle(
        thoughts=served.chat.thoughts,
        starts_in_thought=served.chat.starts_in_thought(text),
        begun=served.chat.begun(text),
        gives_thoughts=request.include_reasoning is not False,
        fills_content=served.chat.fills_content(request),
        plan=plan,
        many_calls=request.parallel_tool_calls is not False,
        prefix=served.chat.continued_text(request) if request.echo else "",
    )
    field = format_field(request)
    if plan.grammar is not None:
        field = "tools" if wanted is None else f"{field} or tools"
    style = _style(
        request, prefix, model, prompt_top_n, top_n, chat=chat, format_field=field,
        field_names=field_names, megatron_fields=_megatron_fields(request, served),
    )  # fmt: skip
    return _asked(request, served, caller, params, [ids_cut], style)


def _megatron_fields(request: ChatRequest, served: ServedModel) -> tuple[str, ...]:
    """What a message tells beside ours where the server is as Megatron's."""
    if not served.as_megatron:
        return ()
    gives_ids = request.return_tokenized_data or request.prevent_retokenization is not False
    raw_text = ("raw_text",) if request.return_raw_text else ()
    return (*MEGATRON_FIELDS, *(MEGATRON_IDS if gives_ids else ()), *raw_text)


def _named_limit(request: msgspec.Struct, first: str, second: str) -> tuple[str, int | None]:
    """Which of two fields names the answer's most tokens, and its value; None where none does."""
    for name in (first, second):
        if (value := getattr(request, name)) is not None:
            return name, value
    return first, None


def _check_style(request: SharedFields, served: ServedModel) -> tuple[str, int | None]:
    """Check how the answer shall be, and that all of it is served; returns the name of its model,
    and how many log probs its prompt has."""
    model = served.name(request.model)
    refuse_what_is_not_served(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise Refusal(
            "best_of is served only where it is n: leave it out, and choose among n answers.",
            param="best_of",
        )
    options = request.stream_options
    if options is not None and not request.stream:
        raise Refusal(
            "stream_options are for streams only: leave them out, or set stream to true.",
            param="stream_options",
        )
    prompt_top_n = log_prob_count("prompt_logprobs", request.prompt_logprobs)
    if prompt_top_n is not None and request.stream:
        raise Refusal(
            "prompt_logprobs are not told in a stream: leave them out, or set stream to false.",
            param="prompt_logprobs",
        )
    return model, prompt_top_n


def _style(
    request: SharedFields,
    prefix: str,
    model: str,
    prompt_top_n: int | None,
    top_n: int | None,
    echo: bool = False,
    is_scoring: bool = False,
    chat: ChatStyle = PLAIN,
    format_field: str = "",
    field_names: Mapping[str, str] | None = None,
    megatron_fields: tuple[str, ...] = (),
) -> AnswerStyle:
    own = request.request_id or os.urandom(ID_BYTES).hex()
    if request.request_id is not None and not REQUEST_ID.fullmatch(own):
        raise not_allowed("request_id", own, "1 to 64 letters, digits, or any of ._-")
    options = request.stream_options
    return AnswerStyle(
        id=prefix + own,
        created=int(time.time()),
        model=model,
        is_stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        top_n=top_n,
        prompt_top_n=prompt_top_n,
        echo=echo,
        is_scoring=is_scoring,
        gives_token_ids=bool(request.return_token_ids),
        gives_versions=bool(request.return_weight_versions),
        names_by_id=bool(request.return_tokens_as_token_ids),
        keeps_special_tokens=request.skip_special_tokens is False,
        chat=chat,
        format_field=format_field,
        field_names=field_names or {},
        megatron_fields=megatron_fields,
    )


def _asked(
    request: SharedFields,
    served: ServedModel,
    caller: Caller,
    params: SamplingParams,
    prompts: list[Sequence[int] | str],
    style: AnswerStyle,
) -> Asked:
    n = 1 if request.n is None else request.n
    most = served.limits.choices
    if not n >= 1 or n * len(prompts) > most:
        raise not_allowed("n", n, f"1 or more, and n times the {len(prompts)} prompts {most}")
    params.return_log_probs = style.top_n is not None or style.prompt_top_n is not None
    params.top_n_logprobs = max(style.top_n or 0, style.prompt_top_n or 0)
    wants_prompt = style.prompt_top_n is not None or (style.echo and style.top_n is not None)
    params.skip_prompt_log_probs = not wants_prompt
    if wants_prompt:
        _check_log_prob_values(n, prompts, params, served)
    check(params, served)
    choices: list[AskedChoice] = []
    for prompt in range(len(prompts)):
        for i in range(n):
            own = copy.copy(params) if choices else params
            own.seed = seed_of(request, i)
            choices.append(AskedChoice(len(choices), prompt, own))
    return Asked(prompts, choices, priority_of(request, served, caller), style)


def _check_log_prob_values(
    n: int, prompts: list[Sequence[int] | str], params: SamplingParams, served: ServedModel
) -> None:
    tokens = sum(map(len, prompts)) * n  # of a text: characters, which are not fewer
    values = tokens * (1 + params.top_n_logprobs)
    if values > served.limits.log_prob_values:
        raise Refusal(
            f"the prompts' log probs would be {values} values, and {served.limits.log_prob_values} "
            "are allowed in one request: send fewer or shorter prompts, or ask for fewer.",
            param="prompt_logprobs",
        )  # fmt: skip
