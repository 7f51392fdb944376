"""`ChoiceText`: the text of one choice and, in a chat, what it is made of."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_async.server.answers.token_names import SpecialTokensView
from megatron_async.server.chat.answer_pieces import CallReader
from megatron_async.server.chat.calls_reader import CallsReader
from megatron_async.server.chat.harmony import ChannelReader, MessageTokens
from megatron_async.server.chat.thoughts import ThoughtReader
from megatron_async.server.fields.asked import Asked, AskedChoice, ChatStyle
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.serving.messages import Ended
from megatron_async.text.token_text import TokenText
from megatron_async.text.tokenizer import Tokenizer

STOPPED = ("termination_id", "stop_token", "stop_word", "grammar")
CUT = ("aborted", "weight_update", "moved", "stale")
"""Reasons of an end on another's behalf."""
_NAMES = dict.fromkeys(CUT, "abort") | dict.fromkeys(STOPPED, "stop")
_NAMES |= {"length": "length", "stale": "stale"}


class ChoiceText:
    """Makes the text of one choice as its tokens arrive.

    Attributes:
        messages: counts the tokens of harmony's messages; None in other forms.
    """

    def __init__(self, asked: Asked, choice: AskedChoice, served: ServedModel) -> None:
        style = asked.style
        view: Tokenizer | SpecialTokensView | None = served.tokenizer
        self.messages: MessageTokens | None = None
        if style.chat.begun is not None:
            view = told_apart = served.text_with_channels[style.keeps_special_tokens]
            self.messages = MessageTokens(told_apart.marks, told_apart.dropped, style.chat.begun)
        elif style.keeps_special_tokens:
            view = served.text_with_special
        elif not style.chat.is_plain:
            view = served.text_with_calls
        self._params = choice.params
        self._eos_ids = served.card.eos_ids
        self._last: int | None = None
        self._text: TokenText | None = None
        if view is not None:
            self._text = TokenText(view, choice.params, asked.prompts[choice.prompt])

    def push(self, tokens: Sequence[int], text: str | None) -> str:
        """Take tokens, and text if the replica makes it; return the text that is settled."""
        self._last = tokens[-1] if tokens else self._last
        if self.messages is not None:
            self.messages.take(tokens)
        if self._text is None:
            return text or ""
        return self._text.push(tokens)

    def stop_word(self, end: Ended) -> str | None:
        """The stop word that has ended the text, behind its end; None where none did."""
        return end.stop_word if self._text is None else self._text.stop_word

    def stop_reason(self, end: Ended) -> int | str | None:
        """What has ended the text, behind its end, in vLLM's words: a stop string, or a token of
        `stop_token_ids`; None for the model's own end tokens, and where nothing of both did."""
        if end.finish_reason == "stop_word":
            return self.stop_word(end)
        is_own = self._last in self._eos_ids and self._params.termination_id != -1
        return None if is_own or end.finish_reason != "stop_token" else self._last

    def end(self, end: Ended) -> str:
        """The rest of the text."""
        if self._text is None:
            return ""
        return self._text.end(end.finish_reason, end.stop_words_from)


def piece_reader(style: ChatStyle) -> CallReader | None:
    """Takes the text of a chat's answer apart; None where it is the content as it is."""
    plan = style.plan
    if style.begun is not None:
        return ChannelReader(style.begun, plan.offered if plan.format else {}, plan.only_calls)
    reader = None
    if plan.format is not None:
        reader = CallsReader(plan.format, plan.offered, plan.only_calls)
    if style.thoughts:
        return ThoughtReader(style.starts_in_thought, reader)
    return reader


def finish_reason(end: Ended, style: ChatStyle, has_calls: bool) -> str:
    """OpenAI's word for how a choice ended ("abort", of an aborted request, is vLLM's; "stale", by
    its `max_version_lag`, ours)."""
    name = _NAMES.get(end.finish_reason or "", "stop")
    return "tool_calls" if name == "stop" and has_calls and not style.plan.is_named else name
