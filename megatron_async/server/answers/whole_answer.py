"""`whole_answer`: an answer that is not streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_async.server.answers.log_probs import (
    chat_log_probs,
    completion_log_probs,
    likeliest,
)
from megatron_async.server.answers.usage import Usage, finish_reason
from megatron_async.server.choice_feed import News
from megatron_async.server.fields.asked import Asked, AskedChoice
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.serving.readers import RequestEnd, TokenLogProbs
from megatron_async.text.token_text import TokenText


def whole_answer(
    asked: Asked, served: ServedModel, choices: Sequence[tuple[News, RequestEnd]]
) -> bytes:
    """The body of an answer.

    Args:
        asked: what it answers.
        served: the model.
        choices: all that came of each, and how it ended; none has failed.
    """
    style, usage = asked.style, Usage()
    found, prompts = [], set()
    for choice, (news, end) in zip(asked.choices, choices, strict=True):
        if choice.prompt not in prompts:
            prompts.add(choice.prompt)
            usage.prompt += end.num_prompt_tokens
            usage.cached += end.num_cached_tokens or 0
        if not style.is_scoring:
            usage.completion += len(news.tokens)
        make = _chat if style.endpoint == "chat" else _completion
        found.append(make(asked, choice, served, news, end))
    is_chat = style.endpoint == "chat"
    return msgspec.json.encode(
        {
            "id": style.id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": style.created,
            "model": style.model,
            "choices": found,
            "usage": usage.as_dict(),
        }
    )


def _chat(
    asked: Asked, choice: AskedChoice, served: ServedModel, news: News, end: RequestEnd
) -> dict[str, Any]:
    style, tokens = asked.style, news.tokens.tolist()
    log_probs = None
    if style.top_n is not None and news.log_probs is not None:
        names = served.names_of_tokens
        log_probs = chat_log_probs(tokens, news.log_probs, style.top_n, names, style.names_by_id)
    content = style.chat.prefix + _text_of(asked, choice, served, news, end)
    answer: dict[str, Any] = {
        "index": choice.index,
        "message": {"role": "assistant", "content": content, "refusal": None},
        "logprobs": log_probs,
        "finish_reason": finish_reason(end),
    }
    if style.gives_token_ids:
        answer["token_ids"] = tokens
    return answer


def _completion(
    asked: Asked, choice: AskedChoice, served: ServedModel, news: News, end: RequestEnd
) -> dict[str, Any]:
    style, tokens = asked.style, news.tokens.tolist()
    text = _text_of(asked, choice, served, news, end)
    if style.is_scoring:
        prompt = asked.prompts[choice.prompt]
        known = isinstance(prompt, str) or served.tokenizer is None
        text = (prompt if isinstance(prompt, str) else "") if known else _plain(served, prompt)
        tokens = []
    answer: dict[str, Any] = {
        "index": choice.index,
        "text": text,
        "logprobs": _with_prompt(asked, choice, served, news, end),
        "finish_reason": "length" if style.is_scoring else finish_reason(end),
    }
    if style.gives_token_ids:
        answer["token_ids"] = tokens
        answer["prompt_token_ids"] = asked.prompts[choice.prompt]
    return answer


def _plain(served: ServedModel, ids: Any) -> str:
    assert served.tokenizer is not None, "looked at by the caller"
    return served.tokenizer.detokenize(list(ids))


def _text_of(
    asked: Asked, choice: AskedChoice, served: ServedModel, news: News, end: RequestEnd
) -> str:
    if served.tokenizer is None:
        return news.text
    text = TokenText(served.tokenizer, choice.params, asked.prompts[choice.prompt])
    known = text.push(news.tokens.tolist())
    return known + text.end(end.finish_reason, end.stop_words_from)


def _with_prompt(
    asked: Asked, choice: AskedChoice, served: ServedModel, news: News, end: RequestEnd
) -> dict[str, Any] | None:
    """Log probs of a completion, the prompt's before them with `echo`: null for its first token, as
    lm-eval expects."""
    style = asked.style
    if style.top_n is None:
        return None
    tokens: list[int] = []
    values: list[float | None] = []
    tops: list[list[tuple[int, float]] | None] = []
    prompt = asked.prompts[choice.prompt]
    if style.echo and not isinstance(prompt, str) and end.prompt_log_probs is not None:
        tokens += list(prompt)
        values += [None, *end.prompt_log_probs.chosen.tolist()]
        tops += [None, *_tops(end.prompt_log_probs, style.top_n)]
    if not style.is_scoring and news.log_probs is not None:
        tokens += news.tokens.tolist()
        values += news.log_probs.chosen.tolist()
        tops += _tops(news.log_probs, style.top_n)
    return completion_log_probs(tokens, values, tops, served.names_of_tokens, style.names_by_id, 0)


def _tops(log_probs: TokenLogProbs, most: int) -> list[list[tuple[int, float]]]:
    return [likeliest(log_probs, place, most) for place in range(len(log_probs.chosen))]
