"""Log probs of the prompt, place by place."""

from __future__ import annotations

import math

from megatron_async.server.answers.choice_text import End
from megatron_async.server.answers.log_prob_json import Place, places
from megatron_async.server.fields.asked import Asked, AskedChoice


def prompt_places(asked: Asked, choice: AskedChoice, end: End, top_n: int) -> list[Place]:
    """The prompt's tokens with their log probs; the first token has none (NaN).

    Args:
        asked: the request.
        choice: of it.
        end: of the choice.
        top_n: likeliest tokens that are wanted at each place.
    """
    prompt = asked.prompts[choice.prompt]
    if isinstance(prompt, str) or end.prompt_log_probs is None:
        return []
    return [(prompt[0], math.nan, []), *places(prompt[1:], end.prompt_log_probs, top_n)]
