"""Log probs of tokens as both endpoints tell them.

Minus infinity is no JSON number: it is told as -9999, as OpenAI does. Completions name the
likeliest tokens by text, where two of one text would be one: the likelier counts, and the token
itself is always among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_async.server.answers.token_names import TokenNames
from megatron_async.serving.readers import TokenLogProbs

LOWEST = -9999.0


Place = tuple[int, float, list[tuple[int, float]]]
"""A token, its log prob, and the likeliest tokens with theirs."""


def places(tokens: Sequence[int], log_probs: TokenLogProbs, top_n: int) -> list[Place]:
    """Log probs place by place, as Python numbers."""
    chosen = log_probs.chosen.tolist()
    if not top_n or log_probs.top_ids is None or log_probs.top is None:
        return [(token, _finite(value), []) for token, value in zip(tokens, chosen)]
    ids, values = log_probs.top_ids[:, :top_n].tolist(), log_probs.top[:, :top_n].tolist()
    return [
        (token, _finite(value), [(i, v) for i, v in zip(near, far) if v > -math.inf])
        for token, value, near, far in zip(tokens, chosen, ids, values)
    ]


def of_completion(
    found: Sequence[Place | None], names: TokenNames, by_id: bool, offset: int = 0
) -> tuple[dict[str, Any], int]:
    """The `logprobs` of a choice of /v1/completions. Of `found`, `(token, nan, [])` is a token
    without a log prob, the prompt's first. With `by_id`, names are "token_id:123". `offset`:
    characters of the choice's text before them.

    Returns:
        the object, and the characters of text behind them.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for place in found:
        assert place is not None
        token, value, top = place
        name = _name(token, names, by_id)
        tokens.append(name)
        offsets.append(offset)
        # Characters begin in these bytes of UTF-8.
        offset += sum((byte & 0xC0) != 0x80 for byte in names.bytes_of(token))
        if math.isnan(value):
            values.append(None)
            tops.append(None)
            continue
        values.append(value)
        near: dict[str, float] = {}
        for other, its in top:
            near.setdefault(_name(other, names, by_id), its)
        near.setdefault(name, value)
        tops.append(near)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }, offset


def of_chat(found: Sequence[Place], names: TokenNames, by_id: bool) -> list[dict[str, Any]]:
    """The entries of `logprobs.content` of a choice of /v1/chat/completions."""
    return [
        {
            **_entry(token, value, names, by_id),
            "top_logprobs": [_entry(other, its, names, by_id) for other, its in top],
        }
        for token, value, top in found
    ]


def of_prompt(
    prompt: Sequence[int], found: Sequence[Place], names: TokenNames
) -> list[dict[str, dict[str, Any]] | None]:
    """VLLM's `prompt_logprobs`: null first, then by token id the log prob, rank and text."""
    told: list[dict[str, dict[str, Any]] | None] = [None]
    for token, value, top in found:
        entries: dict[str, dict[str, Any]] = {}
        for rank, (other, its) in enumerate(top, 1):
            entries[str(other)] = _ranked(other, its, rank, names)
        # Beyond the likeliest its rank is not known: one behind them is the least that it can be.
        entries.setdefault(str(token), _ranked(token, value, len(top) + 1, names))
        told.append(entries)
    return told[: len(prompt)]


def _ranked(token: int, value: float, rank: int, names: TokenNames) -> dict[str, Any]:
    return {"logprob": _finite(value), "rank": rank, "decoded_token": names.text_of(token)}


def _entry(token: int, value: float, names: TokenNames, by_id: bool) -> dict[str, Any]:
    return {
        "token": _name(token, names, by_id),
        "logprob": _finite(value),
        "bytes": list(names.bytes_of(token)),
    }


def _name(token: int, names: TokenNames, by_id: bool) -> str:
    return f"token_id:{token}" if by_id else names.text_of(token)


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST
