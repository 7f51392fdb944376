"""Prompts of a request, texts or token ids, and the room that they leave for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from megatron_async.server.fields.refusal import Refusal, not_allowed
from megatron_async.server.fields.request_bodies import (
    ChatRequest,
    CompletionRequest,
    SharedFields,
)
from megatron_async.server.fields.served_model import ServedModel


def completion_prompts(
    request: CompletionRequest, most: int | None, served: ServedModel
) -> list[Sequence[int] | str]:
    """The prompts, as token ids where there is a tokenizer; arguments as those of `cut`."""
    found = _as_list(request.prompt)
    if len(found) > served.limits.prompts:
        raise Refusal(
            f"prompt has {len(found)} prompts, and {served.limits.prompts} are allowed in one "
            "request: send several.", param="prompt",
        )  # fmt: skip
    return [_one(prompt, request, most, served) for prompt in found]


def check_prompt(ids: Sequence[int], served: ServedModel, param: str) -> None:
    """Raise Refusal if token ids are no prompt for the model."""
    if not len(ids):
        raise Refusal("the prompt is empty: give at least one token.", param=param)
    if len(ids) >= served.card.max_sequence_length:
        raise served.too_long(f"the prompt has {len(ids)} tokens", param)
    if min(ids) < 0 or max(ids) >= served.card.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < served.card.vocab_size)
        allowed = f"token ids from 0 to {served.card.vocab_size - 1}, which are this model's"
        raise not_allowed(param, wrong, allowed)


def cut(
    ids: Sequence[int], request: SharedFields, most: int | None, served: ServedModel
) -> Sequence[int]:
    """What vLLM's `truncate_prompt_tokens` and `truncation_side` leave of a prompt: so many of its
    last tokens, or, with "right", of its first ones; -1: as many as fit. `most`: tokens of the
    answer, as the request names them; None: it does not."""
    truncate, side = request.truncate_prompt_tokens, request.truncation_side
    if side not in (None, "left", "right"):
        raise not_allowed("truncation_side", side, '"left" or "right"')
    if truncate is None:
        return ids
    if truncate == -1:
        truncate = max(served.card.max_sequence_length - (most or 1), 1)
    if truncate < 1:
        allowed = "1 or more, or -1 for as many as fit"
        raise not_allowed("truncate_prompt_tokens", truncate, allowed)
    return ids[:truncate] if side == "right" else ids[-truncate:]


def _as_list(prompt: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    if prompt is None or prompt == []:
        raise Refusal("prompt is missing or empty: give a text or token ids.", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise Refusal(
            "prompt mixes texts, token ids and lists: give one of a text, a list of texts, a list "
            "of token ids, or a list of such lists.", param="prompt",
        )  # fmt: skip
    if kinds == {int}:
        return [cast(list[int], prompt)]
    return cast(list[str | list[int]], prompt)


def _one(
    prompt: str | list[int], request: CompletionRequest, most: int | None, served: ServedModel
) -> Sequence[int] | str:
    if prompt in ("", []):
        raise Refusal("a prompt is empty: give at least one token.", param="prompt")
    ids: Sequence[int]
    if isinstance(prompt, str):
        if served.tokenizer is None and served.card.replica_makes_text:
            if request.truncate_prompt_tokens is not None:
                raise Refusal(
                    "truncate_prompt_tokens needs this server to have the tokens of a text, which "
                    "only the replicas have: send token ids.", param="truncate_prompt_tokens",
                )  # fmt: skip
            return prompt
        ids = served.tokenize(prompt, request.add_special_tokens is not False, "prompt")
    else:
        ids = prompt
    ids = cut(ids, request, most, served)
    check_prompt(ids, served, "prompt")
    return ids


def checked_limit(name: str, value: int | None) -> int | None:
    """A number of tokens to generate, which must be 1 or more."""
    if value is not None and value < 1:
        raise not_allowed(name, value, "1 or more")
    return value


def with_earlier_tokens(
    request: ChatRequest,
    served: ServedModel,
    tools: Sequence[dict[str, Any]] | None,
    ids: list[int],
) -> list[int]:
    """A chat's token ids with those of its earlier turns as they were: where the assistant's last
    message brings the ids of its prompt and of its answer, these stand for what template and
    tokenizer make of the chat up to the end of that answer (Megatron-Core's
    `prevent_retokenization`)."""
    messages = request.messages
    last = [place for place, message in enumerate(messages) if message.role == "assistant"][-1:]
    if request.prevent_retokenization is False or not last:
        return ids
    known: list[int] = []
    for name in ("prompt_token_ids", "generation_token_ids"):
        raw = bytes(getattr(messages[last[0]], name)) or b"null"
        try:
            found = msgspec.json.decode(raw, type=list[int] | None)
        except msgspec.ValidationError as error:
            where = f"messages[{last[0]}].{name}"
            raise Refusal(f"{where}: {error}: give token ids.", param="messages") from error
        if found is None:
            return ids
        known += found
    assert served.tokenizer is not None, "it has made the ids"
    ends = {*served.card.eos_ids, *served.tokenizer.eos_ids}
    if known and known[-1] in ends:
        known.pop()
    earlier = msgspec.structs.replace(
        request, messages=messages[: last[0] + 1], add_generation_prompt=False,
        continue_final_message=None,
    )  # fmt: skip
    text = served.chat.render(earlier, tools)
    length = len(served.tokenize(text, request.add_special_tokens is True, "messages"))
    place = min(length, len(ids))
    # From the end of that answer on the chat is new; the template may write nothing there.
    end = next((n for n in reversed(range(place)) if ids[n] in ends), place)
    return known + ids[end:]


def check_room(
    name: str, value: int | None, prompts: Sequence[Sequence[int] | str], served: ServedModel
) -> int | None:
    """The limit that a request names and its prompt leaves room for.

    Others are refused, as at OpenAI's and vLLM's servers, instead of cut in silence. The first
    words are Anthropic's: Claude Code reads the three numbers and asks again for fewer tokens.

    A text of which only the replica has the tokens counts as one token. `value` is None where the
    request names none, and the answer ends with the context. At the server that stands for
    Megatron's, which never refuses one, the limit is the room."""
    longest = max(1 if isinstance(prompt, str) else len(prompt) for prompt in prompts)
    context = served.card.max_sequence_length
    room = context - longest
    if value is not None and served.as_megatron:
        return min(value, room)
    if value is not None and value > room:
        shown = str(value) if value < 2**64 else "a number of more than 64 bits"
        raise Refusal(
            f"input length and `{name}` exceed context limit: {longest} + {shown} > {context} "
            f"tokens. Give {name} of at most {room}, or shorten the prompt.",
            param=name, code="context_length_exceeded",
        )  # fmt: skip
    return value
