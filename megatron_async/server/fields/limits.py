"""`Limits`: how much one HTTP request may ask for."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one HTTP request. What is beyond them gets 400 (a body: 413).

    Attributes:
        body_bytes: of the JSON text.
        json_depth: objects and lists inside one another.
        json_parts: objects, lists and members of objects.
        choices: answers, which is n times the prompts.
        prompts: in one request for completions.
        messages: of a chat; and entries of any other list that is looked at one by one.
        tools: that a chat may offer.
        log_prob_values: prompt tokens times log probs at each, of all choices; they make an answer
            of about 50 bytes each.
        priority: most by which a request without the admin key may be served later or earlier.
        template_bytes: JSON of a small chat; a larger one is rendered in a process for such, where
            it may take its time.
        answer_tokens: of an answer whose request gives no limit (`ServedModel.answer_tokens`).
    """

    body_bytes: int = 32 << 20
    json_depth: int = 128
    json_parts: int = 2**18
    choices: int = 128
    prompts: int = 128
    messages: int = 4096
    tools: int = 128
    log_prob_values: int = 2_000_000
    priority: int = 0
    template_bytes: int = 64 << 10
    answer_tokens: int | None = None
