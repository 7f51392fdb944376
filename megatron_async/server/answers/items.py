"""`ItemWriter`: writes a choice of an answer as the events or the JSON object of a protocol.

A choice is a row of items: thoughts, texts, calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from megatron_async.server.fields.asked import Asked, AskedChoice
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.serving.messages import Ended
from megatron_async.serving.readers import TokenLogProbs


class PromptTokensDetails(msgspec.Struct):
    """How many of the prompt's tokens were found in the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Numbers of tokens, as OpenAI gives them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class UsageCount:
    """Counts what the choices of one answer use; a prompt of several choices counts once."""

    def __init__(self, num_prompts: int) -> None:
        self._prompts = [0] * num_prompts
        self._cached = [0] * num_prompts
        self.generated = 0

    def set_prompt(self, prompt: int, tokens: int, cached: int = 0) -> None:
        """Length of a prompt, and most cached tokens of it among the choices."""
        self._prompts[prompt] = max(self._prompts[prompt], tokens)
        self._cached[prompt] = max(self._cached[prompt], cached)

    def usage(self) -> Usage:
        """The numbers so far."""
        prompt = sum(self._prompts)
        details = PromptTokensDetails(sum(self._cached))
        return Usage(prompt, self.generated, prompt + self.generated, details)


Kind = Literal["thought", "text", "call"]
_encode = msgspec.json.Encoder().encode


@dataclass(eq=False, slots=True)
class Item:
    """A part of an answer.

    Attributes:
        kind: "call" is a call of a function.
        texts: parts of the text, or of the JSON text of the arguments, if the writer keeps them.
        log_probs: of a text's tokens, as `of_chat` writes them.
    """

    kind: Kind
    place: int
    id: str
    name: str = ""
    texts: list[str] = field(default_factory=list)
    log_probs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


@dataclass(slots=True)
class ItemResult:
    """A choice that has ended.

    Attributes:
        reason: OpenAI's word for how it ended: "stop", "length", "tool_calls", "abort"
            or "stale".
        stop_word: that ended it, or None.
        stop_reason: vLLM's word for what ended it (`ChoiceText.stop_reason`).
        generated_tokens, thought_tokens: of the answer, and of its thoughts.
    """

    items: list[Item]
    end: Ended
    reason: str
    stop_word: str | None
    stop_reason: int | str | None
    generated_tokens: int
    thought_tokens: int


class ItemWriter:
    """Writes one choice of an answer in one protocol. What a protocol has no event for is b"".

    Attributes:
        tells_empty: an answer without any token has an empty text.
        tells_aborts: there is a word for an answer that was aborted; else it has failed.
        is_by_token: thoughts and log probs are sent for single tokens.
        splice: what stands before and behind each text of a stream that tells nothing else.
    """

    tells_empty = False
    tells_aborts = False
    is_by_token = True
    splice: tuple[bytes, bytes] | None = None

    def __init__(self, asked: Asked, choice: AskedChoice, served: ServedModel) -> None:
        self.asked, self.choice, self.served, self.style = asked, choice, served, asked.style

    def new_id(self, kind: Kind) -> str:
        """An id for an item."""
        raise NotImplementedError

    def begun(self) -> bytes:
        """Events before any token."""
        return b""

    def took(self, tokens: list[int], log_probs: TokenLogProbs | None) -> None:
        """Tokens whose text, if it is settled, comes next."""

    def opened(self, item: Item) -> bytes:
        """Events of a new item."""
        return b""

    def more(self, item: Item, text: str) -> bytes:
        """Events of more text of it."""
        raise NotImplementedError

    def closed(self, item: Item) -> bytes:
        """Events of an item's end."""
        return b""

    def rest(self) -> bytes:
        """Events of tokens that came with no text."""
        return b""

    def finished(self, result: ItemResult) -> bytes:
        """The last events of the choice."""
        raise NotImplementedError

    def failed(self, refusal: Refusal) -> bytes:
        """The last events of a choice that has failed."""
        raise NotImplementedError

    def last(self, usage: UsageCount) -> bytes:
        """Events behind the last choice."""
        return b""

    def whole(self, result: ItemResult) -> dict[str, Any]:
        """The whole choice, as JSON values."""
        raise NotImplementedError

    def body(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """The whole answer, as JSON values. `choices` are what `whole` has made of this one and
        those behind it."""
        return choices[0]


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """One event of a stream that names its events; `type` in its data is the name too."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))
