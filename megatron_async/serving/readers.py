"""`TokenReader`, to which a client gives the tokens of its requests, its arguments and errors."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_async.errors import ReplicaLost
from megatron_async.serving.messages import TOKEN_BYTES, Ended

logger = logging.getLogger("megatron_async")


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log probs of some tokens of a request.

    Attributes:
        chosen: float32 `[n]`, of the tokens themselves.
        top_ids: int32 `[n, k]`: the likeliest tokens at each place, likeliest first; None if they
            were not asked for.
        top: float32 `[n, k]`, their log probs; -inf where filters left fewer.
    """

    chosen: NDArray[np.float32]
    top_ids: NDArray[np.int32] | None = None
    top: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, words: NDArray[np.int32], top_n: int, wanted: int) -> TokenLogProbs:
        """Make log probs of words as they travel. `words` are int32 `[n, 1 + 2 * top_n]`
        (`messages.LogProbRows`); of these the request asked for `wanted`."""
        floats = words.view(np.float32)
        if not wanted:
            return cls(floats[:, 0])
        return cls(
            floats[:, 0], words[:, 1 : 1 + wanted], floats[:, 1 + top_n : 1 + top_n + wanted]
        )

    def __getitem__(self, places: slice) -> TokenLogProbs:
        if self.top_ids is None or self.top is None:
            return TokenLogProbs(self.chosen[places])
        return TokenLogProbs(self.chosen[places], self.top_ids[places], self.top[places])


def prompt_log_probs_of(ended: Ended) -> TokenLogProbs | None:
    """Log probs of a prompt's tokens but the first; None if they were not asked for."""
    if (found := ended.prompt_log_probs) is None:
        return None
    words = np.frombuffer(found.words, np.int32).reshape(-1, 1 + 2 * found.top_n)
    return TokenLogProbs.of(words, found.top_n, found.top_n)


class TokenReader:
    """One unfinished request at its client, on whose event loop a subclass is called with its
    tokens, texts and end. It must neither block nor await. An exception that it raises fails only
    this request.

    Attributes:
        number: the client's; -1 before it is sent.
        top_n: alternatives that the request asked for at each token.
        generated: its tokens so far, int32 as bytes.
    """

    def __init__(self) -> None:
        self.number = -1
        self.top_n = 0
        self.generated = bytearray()
        self._repeated = -1
        """Bytes of `generated` that a further attempt has repeated; -1: all."""
        self._chars = 0
        self._chars_again = -1

    # ---- What a subclass is told -------------------------------------------------------------

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        """New tokens.

        Args:
            tokens: int32 (format "i") `[n]`, n > 0: a view of a message; copy it to keep it. It is
                no array, because for one token a view takes a third of the time.
            log_probs: of the tokens; None if they were not asked for.
        """

    def text(self, text: str) -> None:
        """New text, after its tokens; only if the replica makes texts."""

    def ended(self, end: Ended) -> None:
        """The request has ended; no further call follows."""

    # ---- What messages say -------------------------------------------------------------------

    def again(self) -> None:
        """What follows begins with the first token."""
        self._repeated = 0 if self.generated else -1
        self._chars_again = 0 if self._chars else -1

    def hear_tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> bool:
        """Take tokens (int32 `[n]`); False if they differ from the tokens that are here."""
        if self._repeated >= 0:
            data = tokens.tobytes()
            known = self.generated[self._repeated : self._repeated + len(data)]
            if not data.startswith(known):
                return False
            self._repeated += len(known)
            if self._repeated == len(self.generated):
                self._repeated = -1
            places = slice(len(known) // TOKEN_BYTES, None)
            tokens = tokens[places]
            log_probs = None if log_probs is None else log_probs[places]
            if not len(tokens):
                return True
        self.generated += tokens
        self.tokens(tokens, log_probs)
        return True

    def hear_text(self, text: str) -> None:
        """Take text."""
        if self._chars_again >= 0:
            known = min(self._chars - self._chars_again, len(text))
            self._chars_again += known
            if self._chars_again == self._chars:
                self._chars_again = -1
            text = text[known:]
        self._chars += len(text)
        if text:
            self.text(text)

    def why_lost(self) -> str:
        """The error text for a further attempt with other tokens."""
        return (
            f"its replica was lost, and another one continues otherwise than the "
            f"{len(self.generated) // TOKEN_BYTES} tokens that were delivered: near ties fall "
            "differently in other batches below float32, and all tokens do after an update of the "
            "weights."
        )

    def hear_end(self, ended: Ended) -> None:
        """Take the end, which is an error if it comes before tokens that are here already. A fault
        of the reader is logged."""
        if ended.failure is None and self._repeated >= 0:
            ended = Ended(self.number, "error", (ReplicaLost.__name__, self.why_lost()))
        try:
            if ended.text:
                self.hear_text(ended.text)
            self.ended(ended)
        except Exception:
            logger.exception("A reader of a request's tokens failed at its end.")

    def fail(self, kind: str, text: str) -> None:
        """End it with an error that the client found."""
        self.hear_end(Ended(self.number, "error", (kind, text)))
