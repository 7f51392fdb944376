"""`Answer`: an answer of any protocol, streamed or whole, by the same steps.

Each choice is a row of items: thoughts, texts, calls. An item opens, grows and is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from megatron_async.server.answers.choice_text import (
    CUT,
    ChoiceText,
    finish_reason,
    piece_reader,
)
from megatron_async.server.answers.items import Item, ItemResult, ItemWriter, Kind, UsageCount
from megatron_async.server.chat.answer_pieces import CallArguments, CallBegin, Piece, Thought
from megatron_async.server.chat.harmony import ChannelReader
from megatron_async.server.fields.asked import Asked, AskedChoice
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.serving.messages import Ended
from megatron_async.serving.readers import TokenLogProbs

ABORTED = "the request was aborted by an administrator, or the service ended."
_encode = msgspec.json.Encoder().encode


class Answer:
    """The answer to one HTTP request. With `one_event_a_token` tokens that come together are sent
    one by one. Its choices are in the order of `asked.choices`."""

    def __init__(
        self,
        writer: Callable[[Asked, AskedChoice, ServedModel], ItemWriter],
        asked: Asked,
        served: ServedModel,
        one_event_a_token: bool = False,
    ) -> None:
        self.usage = UsageCount(len(asked.prompts))
        for place, prompt in enumerate(asked.prompts):
            if not isinstance(prompt, str):
                self.usage.set_prompt(place, len(prompt))
        self.choices = [
            AnswerChoice(self, writer(asked, choice, served), one_event_a_token)
            for choice in asked.choices
        ]
        self.num_open = len(self.choices)

    def begin(self) -> bytes:
        """The events before any token."""
        return b"".join(choice.writer.begun() for choice in self.choices)

    def body(self) -> bytes:
        """The whole answer as JSON text; all choices must have ended, or one has failed.

        Raises:
            Refusal: a choice has failed; so has the answer.
        """
        for choice in self.choices:
            if choice.failure is not None:
                raise choice.failure
        choices = [choice.whole() for choice in self.choices]
        return _encode(self.choices[0].writer.body(choices, self.usage.usage()))


class AnswerChoice:
    """One choice of an `Answer`."""

    def __init__(self, answer: Answer, writer: ItemWriter, one_event_a_token: bool) -> None:
        self._answer, self.writer = answer, writer
        self._style = style = writer.style
        self._chat = style.chat
        self._text = ChoiceText(writer.asked, writer.choice, writer.served)
        self._pieces = piece_reader(self._chat)
        self._splice = writer.splice if self._pieces is None else None
        told_apart = self._chat.thoughts or style.top_n is not None
        self._by_token = one_event_a_token or (writer.is_by_token and told_apart)
        self._items: list[Item] = []
        self._open: Item | None = None
        self._num_calls = self._num_tokens = self._num_thought_tokens = 0
        self._result: ItemResult | None = None
        self.failure: Refusal | None = None

    def push(
        self, tokens: Sequence[int], log_probs: TokenLogProbs | None = None, text: str | None = None
    ) -> bytes:
        """The events of new tokens; none while their text may still change. `text` is what the
        replica makes."""
        ids = list(tokens)
        if not self._by_token or len(ids) < 2:
            return self._push(ids, log_probs, text)
        events = [
            self._push([token], None if log_probs is None else log_probs[i : i + 1], None)
            for i, token in enumerate(ids)
        ]
        return b"".join(events) + (self._push([], None, text) if text else b"")

    def end(self, end: Ended) -> bytes:
        """The last events of this choice and, if it is the last to end, of the answer."""
        answer, writer = self._answer, self.writer
        answer.num_open -= 1
        answer.usage.set_prompt(
            writer.choice.prompt, end.num_prompt_tokens, end.num_cached_tokens or 0
        )
        failure = end.failure
        if failure is None and end.finish_reason in CUT and not writer.tells_aborts:
            failure = ("RequestAborted", ABORTED)
        if failure is not None:
            self.failure = self._style.refusal(*failure)
            events = writer.failed(self.failure)
        else:
            events = self._finish(end)
        return events if answer.num_open else events + writer.last(answer.usage)

    def whole(self) -> dict[str, Any]:
        """The choice as JSON values; it must have ended without a failure."""
        assert self._result is not None, "the choice has ended"
        return self.writer.whole(self._result)

    def _finish(self, end: Ended) -> bytes:
        events = self._take(self._text.end(end), is_end=True)
        if not self._items and self.writer.tells_empty:
            events += self._begin_item("text")
        events += self._close()
        num_thought_tokens = self._num_thought_tokens
        if self._text.messages is not None and isinstance(self._pieces, ChannelReader):
            num_thought_tokens = self._text.messages.of(self._pieces.reasoning)
        self._result = ItemResult(
            self._items,
            end,
            finish_reason(end, self._chat, self._num_calls > 0),
            self._text.stop_word(end),
            self._text.stop_reason(end),
            self._num_tokens,
            num_thought_tokens,
        )
        return events + self.writer.finished(self._result)

    def _push(self, ids: list[int], log_probs: TokenLogProbs | None, text: str | None) -> bytes:
        self._num_tokens += len(ids)
        self._answer.usage.generated += len(ids)
        settled = self._text.push(ids, text)
        if self._splice is not None:
            before, after = self._splice
            return before + _encode(settled) + after if settled else b""
        self.writer.took(ids, log_probs)
        events = self._take(settled, is_end=False) + self.writer.rest()
        if self._open is not None and self._open.kind == "thought":
            self._num_thought_tokens += len(ids)
        return events

    def _take(self, text: str, is_end: bool) -> bytes:
        if self._pieces is None:  # all of it is content
            return self._more("text", text) if text else b""
        pieces = self._pieces.push(text) if text else []
        if is_end:
            pieces = pieces + self._pieces.end()
        return b"".join(map(self._piece, pieces))

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallBegin):
            self._num_calls += 1
        if isinstance(piece, CallBegin | CallArguments):
            if self._num_calls > 1 and not self._chat.many_calls:
                return b""
            if isinstance(piece, CallBegin):
                return self._begin_item("call", piece.name)
            assert self._open is not None, "arguments come behind the begin of a call"
            return self.writer.more(self._open, piece.text)
        return self._more("thought" if isinstance(piece, Thought) else "text", piece.text)

    def _more(self, kind: Kind, text: str) -> bytes:
        if self._open is not None and self._open.kind == kind:
            return self.writer.more(self._open, text)
        events = self._begin_item(kind)
        assert self._open is not None, "it has begun"
        return events + self.writer.more(self._open, text)

    def _begin_item(self, kind: Kind, name: str = "") -> bytes:
        events = self._close()
        self._open = Item(kind, len(self._items), self.writer.new_id(kind), name)
        self._items.append(self._open)
        return events + self.writer.opened(self._open)

    def _close(self) -> bytes:
        item, self._open = self._open, None
        return b"" if item is None else self.writer.closed(item)
