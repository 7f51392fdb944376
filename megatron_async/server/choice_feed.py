"""`ChoiceFeed`: what has come of one choice of an answer and is not written yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from megatron_async.serving.messages import Ended
from megatron_async.serving.readers import TokenLogProbs, TokenReader


class News(NamedTuple):
    """New tokens and text of a choice. `text` is what the replica makes; None where this process
    makes texts."""

    tokens: list[int]
    log_probs: TokenLogProbs | None
    text: str | None


class ChoiceFeed(TokenReader):
    """Keeps tokens as numbers until they are written. `told` is called behind everything that
    comes, with whether it cannot wait.

    Attributes:
        first_ns: when the first ones came, in nanoseconds since 1970; 0 before.
        end: how the request ended; None before.
        ended_ns: when, in nanoseconds since 1970.
        keeps_aborted: an aborted request has ended with the tokens that came; else it has failed.
    """

    keeps_aborted = False

    def __init__(self, told: Callable[[ChoiceFeed, bool], None]) -> None:
        super().__init__()
        self._told = told
        self._tokens = bytearray()
        """Int32: a reader that stalls costs 4 bytes a token."""
        self._log_probs: list[TokenLogProbs] = []
        self._texts: list[str] = []
        self.num_tokens = self.first_ns = 0
        self.end: Ended | None = None
        self.ended_ns = 0

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        """New tokens; the first ones cannot wait."""
        was_told = len(self._tokens) > 0
        self._tokens += tokens
        self.num_tokens += len(tokens)
        if log_probs is not None:
            self._log_probs.append(_copied(log_probs))
        if was_told:
            return
        is_first = not self.first_ns
        if is_first:
            self.first_ns = time.time_ns()
        self._told(self, is_first)

    def text(self, text: str) -> None:
        """New text of a replica's own tokenizer."""
        self._texts.append(text)
        self._told(self, False)

    def ended(self, end: Ended) -> None:
        """The request has ended, which cannot wait."""
        if self.keeps_aborted and end.finish_reason == "aborted":
            end = msgspec.structs.replace(end, failure=None)
        self.end, self.ended_ns = end, time.time_ns()
        self._told(self, True)

    @property
    def has_news(self) -> bool:
        """Whether something came since the last `take`."""
        return bool(self._tokens or self._texts)

    def take(self) -> News:
        """All that came since the last time."""
        tokens = memoryview(self._tokens).cast("i").tolist()
        log_probs = _joined_log_probs(self._log_probs) if self._log_probs else None
        text = "".join(self._texts) if self._texts else None
        self._tokens, self._log_probs, self._texts = bytearray(), [], []
        return News(tokens, log_probs, text)


def _copied(log_probs: TokenLogProbs) -> TokenLogProbs:
    if log_probs.top_ids is None or log_probs.top is None:
        return TokenLogProbs(log_probs.chosen.copy())
    return TokenLogProbs(log_probs.chosen.copy(), log_probs.top_ids.copy(), log_probs.top.copy())


def _joined_log_probs(parts: list[TokenLogProbs]) -> TokenLogProbs:
    if len(parts) == 1:
        return parts[0]
    chosen = np.concatenate([part.chosen for part in parts])
    ids = [part.top_ids for part in parts if part.top_ids is not None]
    values = [part.top for part in parts if part.top is not None]
    if len(ids) < len(parts):
        return TokenLogProbs(chosen)
    return TokenLogProbs(chosen, np.concatenate(ids), np.concatenate(values))
