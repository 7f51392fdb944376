"""`ItemAnswer`: an answer as a row of items (thoughts, texts, calls), for the protocols that tell
it so: OpenAI's Responses and Anthropic's Messages.

An item opens, grows and is closed; a `ItemWriter` puts that into its protocol's events. A whole
answer is made by the same steps, and its events are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from megatron_async.server.answers.choice_text import (
    ChoiceText,
    End,
    finish_reason,
    piece_reader,
    pieces_of,
)
from megatron_async.server.answers.log_prob_json import LogProbs, of_chat, places
from megatron_async.server.chat.answer_pieces import CallArguments, CallBegin, Piece, Thought
from megatron_async.server.fields.asked import Asked
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel

Kind = Literal["thought", "text", "call"]
ABORTED = "the request was aborted by an administrator, or the service ended."


@dataclass(eq=False, slots=True)
class Item:
    """A part of an answer.

    Attributes:
        kind: "call" is a call of a function.
        place: in the answer, from 0.
        id: of the item; a call's result refers to it.
        name: of the function.
        texts: parts of the text, or of the JSON text of the arguments.
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
    """An answer that has ended.

    Attributes:
        items: in their order.
        reason: OpenAI's word for how it ended: "stop", "length" or "tool_calls".
        stop_word: that ended it, or None.
        prompt_tokens, cached_tokens: of the prompt, and those of them that a cache had.
        generated_tokens, thought_tokens: of the answer, and those of them that were thoughts.
    """

    items: list[Item]
    reason: str
    stop_word: str | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    thought_tokens: int


class ItemWriter(Protocol):
    """Writes an answer in one protocol.

    Attributes:
        tells_empty: an answer without any token has an empty text.
    """

    tells_empty: bool

    def new_id(self, kind: Kind) -> str:
        """An id for an item."""

    def begun(self, prompt_tokens: int) -> bytes:
        """Events before any token."""

    def opened(self, item: Item) -> bytes:
        """Events of a new item."""

    def more(self, item: Item, text: str, log_probs: list[dict[str, Any]]) -> bytes:
        """Events of more text of it."""

    def closed(self, item: Item) -> bytes:
        """Events of an item's end."""

    def finished(self, result: ItemResult) -> bytes:
        """The last events."""

    def failed(self, refusal: Refusal) -> bytes:
        """The last events of an answer that has failed."""

    def body(self, result: ItemResult) -> dict[str, Any]:
        """The whole answer, as JSON values."""


class ItemAnswer:
    """The one choice of an answer; a `ChoiceFormatter`.

    Args:
        asked: the request, of one choice.
        served: the model.
        writer: of its protocol.
        one_event_a_token: tokens that come together are told one by one.

    Attributes:
        result: how it ended; None before, and of an answer that has failed.
        failure: why it has failed, or None.
    """

    def __init__(
        self, asked: Asked, served: ServedModel, writer: ItemWriter, one_event_a_token: bool = False
    ) -> None:
        self._asked, self._served, self._writer = asked, served, writer
        self._text = ChoiceText(asked, asked.choices[0], served)
        self._chat = asked.style.chat
        self._pieces = piece_reader(self._chat)
        # Whose log probs, and whether a thought's, is known only of tokens taken one by one.
        self._by_token = one_event_a_token or self._chat.thoughts or asked.style.top_n is not None
        self._items: list[Item] = []
        self._open: Item | None = None
        self._log_probs: list[dict[str, Any]] = []
        self._num_calls = self._num_tokens = self._num_thought_tokens = 0
        self.result: ItemResult | None = None
        self.failure: Refusal | None = None

    def begin(self) -> bytes:
        """The events before any token."""
        return self._writer.begun(len(self._asked.prompts[0]))

    def push(
        self, tokens: Sequence[int], log_probs: LogProbs | None = None, text: str | None = None
    ) -> bytes:
        """Events of new tokens; the arguments are those of `StreamFormatter.push`."""
        ids = list(tokens)
        if not self._by_token or len(ids) < 2:
            return self._push(ids, log_probs, text)
        events = [
            self._push([token], None if log_probs is None else log_probs[i : i + 1], None)
            for i, token in enumerate(ids)
        ]
        return b"".join(events) + (self._push([], None, text) if text else b"")

    def end(self, end: End) -> bytes:
        """The last events."""
        failure = end.failure
        if failure is None and end.finish_reason == "aborted":
            failure = ("RequestAborted", ABORTED)
        if failure is not None:
            self.failure = self._asked.style.refusal(*failure)
            return self._writer.failed(self.failure)
        events = self._take(self._text.end(end), is_end=True)
        if not self._items and self._writer.tells_empty:
            events += self._begin_item("text")
        events += self._close()
        self.result = ItemResult(
            self._items,
            finish_reason(end, self._chat, self._num_calls > 0),
            self._text.stop_word(end),
            end.num_prompt_tokens,
            end.num_cached_tokens or 0,
            self._num_tokens,
            self._num_thought_tokens,
        )
        return events + self._writer.finished(self.result)

    def body(self) -> bytes:
        """The whole answer as JSON text; it must have ended.

        Raises:
            Refusal: it has failed.
        """
        if self.failure is not None:
            raise self.failure
        assert self.result is not None, "the answer has ended"
        return msgspec.json.encode(self._writer.body(self.result))

    def _push(self, ids: list[int], log_probs: LogProbs | None, text: str | None) -> bytes:
        self._num_tokens += len(ids)
        top_n = self._asked.style.top_n
        if log_probs is not None and top_n is not None:
            found = places(ids, log_probs, top_n)
            self._log_probs += of_chat(found, self._served.names_of_tokens, False)
        events = self._take(self._text.push(ids, text), is_end=False)
        if self._open is not None and self._open.kind == "thought":
            self._num_thought_tokens += len(ids)
        return events

    def _take(self, text: str, is_end: bool) -> bytes:
        return b"".join(map(self._piece, pieces_of(self._pieces, text, is_end)))

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallBegin):
            self._num_calls += 1
        if isinstance(piece, CallBegin | CallArguments):
            if self._num_calls > 1 and not self._chat.many_calls:
                return b""
            if isinstance(piece, CallBegin):
                return self._begin_item("call", piece.name)
            return self._more(piece.text)
        kind: Kind = "thought" if isinstance(piece, Thought) else "text"
        events = b""
        if self._open is None or self._open.kind != kind:
            events = self._begin_item(kind)
        return events + self._more(piece.text)

    def _begin_item(self, kind: Kind, name: str = "") -> bytes:
        events = self._close()
        self._open = Item(kind, len(self._items), self._writer.new_id(kind), name)
        self._items.append(self._open)
        return events + self._writer.opened(self._open)

    def _more(self, text: str) -> bytes:
        item = self._open
        assert item is not None, "text belongs to an item"
        log_probs, self._log_probs = self._log_probs, []
        if item.kind == "text":
            item.log_probs += log_probs
        item.texts.append(text)
        return self._writer.more(item, text, log_probs if item.kind == "text" else [])

    def _close(self) -> bytes:
        item, self._open = self._open, None
        return b"" if item is None else self._writer.closed(item)


_encode = msgspec.json.Encoder().encode


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """One event of a stream that names its events; `type` in its data is the name too."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))
