"""Log probs in the forms of both endpoints.

`/v1/completions` has lists beside each other (`tokens`, `token_logprobs`, `top_logprobs`,
`text_offset`), `/v1/chat/completions` one object a token, with its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_async.server.answers.token_names import TokenNames
from megatron_async.serving.readers import TokenLogProbs

LOWEST = -9999.0
"""What OpenAI's clients are told for minus infinity, which JSON does not have (vLLM's number)."""


def finite(value: float) -> float:
    """A log prob that JSON has."""
    return value if math.isfinite(value) else LOWEST


def likeliest(log_probs: TokenLogProbs, place: int, most: int) -> list[tuple[int, float]]:
    """Token ids and log probs of the likeliest tokens at a place."""
    if log_probs.top_ids is None or log_probs.top is None:
        return []
    ids, values = log_probs.top_ids[place, :most].tolist(), log_probs.top[place, :most].tolist()
    return [(token, value) for token, value in zip(ids, values, strict=True) if value > -math.inf]


def chat_log_probs(
    tokens: Sequence[int], log_probs: TokenLogProbs, most: int, names: TokenNames, by_id: bool
) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""

    def entry(token: int, value: float) -> dict[str, Any]:
        name, data = names.of(token, by_id)
        return {"token": name, "logprob": finite(value), "bytes": list(data)}

    content = []
    for place, (token, value) in enumerate(zip(tokens, log_probs.chosen.tolist(), strict=True)):
        top = [entry(*pair) for pair in likeliest(log_probs, place, most)]
        content.append({**entry(token, value), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_log_probs(
    tokens: Sequence[int],
    values: Sequence[float | None],
    tops: Sequence[list[tuple[int, float]] | None],
    names: TokenNames,
    by_id: bool,
    offset: int,
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice.

    Args:
        tokens: ids.
        values: of each; None where there is none (a prompt's first token).
        tops: the likeliest tokens at each place; None where there are none.
        names: what tokens are called.
        by_id: call them by their ids.
        offset: characters of the text before the first token.
    """
    found: dict[str, Any] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
    }  # fmt: skip
    for token, value, top in zip(tokens, values, tops, strict=True):
        name, _ = names.of(token, by_id)
        found["tokens"].append(name)
        found["token_logprobs"].append(None if value is None else finite(value))
        found["text_offset"].append(offset)
        offset += len(name)
        named: dict[str, float] | None = None
        if top is not None:
            named = {}
            for other, other_value in [*top, (token, value)]:
                if other_value is not None:
                    named.setdefault(names.of(other, by_id)[0], finite(other_value))
        found["top_logprobs"].append(named)
    return found
