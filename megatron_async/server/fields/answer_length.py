"""How many tokens an answer may have: one rule for all endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_async.server.fields.refusal import Refusal, not_allowed
from megatron_async.server.fields.served_model import ServedModel


def checked_limit(name: str, value: int | None) -> int | None:
    """A number of tokens to generate.

    Raises:
        Refusal: it is less than 1.
    """
    if value is not None and value < 1:
        raise not_allowed(name, value, "1 or more")
    return value


def check_room(
    name: str, value: int | None, prompts: Sequence[Sequence[int] | str], served: ServedModel
) -> None:
    """Refuse a limit that a request names and its prompt leaves no room for.

    A text of which only the replica has the tokens counts as one token.

    Args:
        name: the field.
        value: None: the request names none, and the answer ends with the context.
        prompts: of the request.
        served: the model.

    Raises:
        Refusal: as OpenAI's and vLLM's servers do, and not cut in silence. Its first words are
            Anthropic's: Claude Code reads the three numbers and asks again for fewer tokens.
    """
    longest = max(1 if isinstance(prompt, str) else len(prompt) for prompt in prompts)
    context = served.card.max_sequence_length
    room = context - longest
    if value is not None and value > room:
        shown = str(value) if value < 2**64 else "a number of more than 64 bits"
        raise Refusal(
            f"input length and `{name}` exceed context limit: {longest} + {shown} > {context} "
            f"tokens. Give {name} of at most {room}, or shorten the prompt.",
            param=name, code="context_length_exceeded",
        )  # fmt: skip
