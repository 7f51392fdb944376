"""Ends that depend on a request's text, as recorded: a replay has no tokenizer."""

from __future__ import annotations

from megatron_async.lab.recording import Added, Event, TextEnd
from megatron_async.requests.request_registry import RequestEntry
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.text.stop_words import StopWordMatcher
from megatron_async.text.structured_output import TokenGrammar
from megatron_async.text.token_watch import EVERYTHING


def without_text(params: SamplingParams) -> SamplingParams:
    """Sampling parameters less what needs a tokenizer. Bad words and grammars shape samples, and
    those are recorded."""
    params = params.copy()
    params.stop_words = params.structured_output = None
    if params.bad_words is not None:
        params.bad_words = [word for word in params.bad_words if not isinstance(word, str)]
    return params


def watch_as_recorded(entry: RequestEntry, params: SamplingParams, end: TextEnd | None) -> None:
    """Let a request that has not been admitted end where its recorded run did, and be scheduled as
    one with stop words or a grammar is.

    Args:
        entry: of a request added with `without_text(params)`.
        params: the recorded ones.
        end: the recorded end; None if it was another than by text.
    """
    own = entry.request.sampling_params
    if params.stop_words is not None or params.structured_output is not None:
        entry.request.watch_row = EVERYTHING  # it is counted in tokens
    if params.stop_words is not None:
        own.stop_words = params.stop_words
        entry.stop_words = _RecordedStopWords(end)
    if params.structured_output is not None:
        own.structured_output = params.structured_output
        entry.grammar = _RecordedGrammar(end)


def text_ends(events: list[Event]) -> dict[int, TextEnd]:
    """Index of an `Added` -> how that request ended by its text; ids may be used again."""
    added: dict[int, int] = {}
    ends = {}
    for index, event in enumerate(events):
        if isinstance(event, Added):
            added[event.request_id] = index
        elif isinstance(event, TextEnd):
            ends[added[event.request_id]] = event
    return ends


class _Countdown:
    """Counts a request's tokens to its recorded end."""

    def __init__(self, end: TextEnd | None) -> None:
        self._end = end
        self._taken = 0

    def take(self) -> None:
        """One more token.

        Raises:
            RuntimeError: the recorded run failed with it.
        """
        self._taken += 1
        if self.is_at("error"):
            raise RuntimeError("its tokenizer or grammar failed when this was recorded")

    def is_at(self, reason: str) -> bool:
        """Whether the recorded request ended with this token, for `reason`."""
        end = self._end
        return end is not None and end.reason == reason and self._taken == end.generated_tokens


class _RecordedStopWords(StopWordMatcher):
    """Matches where the recorded run did."""

    def __init__(self, end: TextEnd | None) -> None:
        self._countdown = _Countdown(end)
        self.counts_from = 0

    def push(self, token: int, counts: bool = True) -> bool:
        """Whether the recorded request ended with this token by a stop word."""
        self._countdown.take()
        return self._countdown.is_at("stop_word")


class _RecordedGrammar(TokenGrammar):
    """Complete where the recorded run's was."""

    def __init__(self, end: TextEnd | None) -> None:
        self._countdown = _Countdown(end)

    def accept(self, token: int) -> None:
        """One more token."""
        self._countdown.take()

    @property
    def failure(self) -> None:
        """What was recorded says that no token could be chosen, and not why."""
        return

    @property
    def is_complete(self) -> bool:
        """Whether the recorded request ended with this token by its grammar."""
        return self._countdown.is_at("grammar")
