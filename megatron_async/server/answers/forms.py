"""Which class makes an answer, by its endpoint, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from megatron_async.server.answer_stream import ChoiceFormatter
from megatron_async.server.answers.choice_text import End
from megatron_async.server.answers.items import ItemAnswer, ItemWriter
from megatron_async.server.answers.log_prob_json import LogProbs
from megatron_async.server.answers.message_writer import MessageWriter
from megatron_async.server.answers.response_writer import ResponseWriter
from megatron_async.server.answers.stream import StreamAnswer
from megatron_async.server.answers.whole import WholeAnswer, whole
from megatron_async.server.fields.asked import Asked
from megatron_async.server.fields.served_model import ServedModel

WRITERS: dict[str, Callable[[Asked], ItemWriter]] = {
    "responses": ResponseWriter,
    "messages": MessageWriter,
}
"""Endpoints whose answers are rows of items."""


class ChoiceCollector(Protocol):
    """Takes the tokens and the end of one choice of a whole answer."""

    def push(
        self, tokens: Sequence[int], log_probs: LogProbs | None = None, text: str | None = None
    ) -> object:
        """Take tokens; the arguments are those of `StreamFormatter.push`."""

    def end(self, end: End) -> object:
        """Take the end."""


class StreamForm(NamedTuple):
    """A streamed answer: makers of its choices' events, and of the events before all others."""

    formatters: Sequence[ChoiceFormatter]
    begin: Callable[[], bytes]


class WholeForm(NamedTuple):
    """A whole answer: takers of its choices, and the maker of its JSON text at the end."""

    collectors: Sequence[ChoiceCollector]
    body: Callable[[], bytes]


def stream_form(asked: Asked, served: ServedModel, one_event_a_token: bool) -> StreamForm:
    """The object that makes a streamed answer.

    Args:
        asked: the request.
        served: the model.
        one_event_a_token: tokens that come together are told one by one.
    """
    writer = WRITERS.get(asked.style.endpoint)
    if writer is None:
        answer = StreamAnswer(asked, served, one_event_a_token)
        return StreamForm(answer.formatters, answer.begin)
    items = ItemAnswer(asked, served, writer(asked), one_event_a_token)
    return StreamForm([items], items.begin)


def whole_form(asked: Asked, served: ServedModel) -> WholeForm:
    """The object that makes a whole answer; its `body` raises Refusal where a choice has failed.

    Args:
        asked: the request.
        served: the model.
    """
    writer = WRITERS.get(asked.style.endpoint)
    if writer is None:
        answer = WholeAnswer(asked, served)
        return WholeForm(answer.collectors, lambda: whole(answer))
    items = ItemAnswer(asked, served, writer(asked))
    return WholeForm([items], items.body)
