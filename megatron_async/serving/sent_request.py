"""`SentRequest`: a client's record of a request that was sent.

A request whose replica is lost is served again from its beginning. The coordinator keeps no tokens:
the client compares repeated tokens with those that it has, and gives its reader only new ones.
"""

from __future__ import annotations

from megatron_async.serving.messages import Ended
from megatron_async.serving.readers import RequestEnd, TokenLogProbs, TokenReader

TOKEN_BYTES = 4


class SentRequest:
    """One unfinished request.

    Args:
        reader: gets tokens, texts and the end.
        top_n: alternatives that it asked for at each token.

    Attributes:
        reader: as given.
        generated: its tokens so far, int32 as bytes.
        has_started: whether the replica that serves it has sent a token.
    """

    __slots__ = (
        "_chars", "_chars_again", "_repeated", "generated", "has_started", "reader", "top_n",
    )  # fmt: skip

    def __init__(self, reader: TokenReader, top_n: int) -> None:
        self.reader = reader
        self.top_n = top_n
        self.generated = bytearray()
        self._repeated = -1
        """Bytes of `generated` that a further attempt has repeated; -1: all."""
        self._chars = 0
        self._chars_again = -1
        self.has_started = False

    def again(self) -> None:
        """What follows begins with the first token."""
        self._repeated = 0 if self.generated else -1
        self._chars_again = 0 if self._chars else -1
        self.has_started = False

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> bool:
        """Take new tokens (int32 `[n]`); False if they differ from the tokens that the client
        has."""
        self.has_started = True
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
        self.reader.tokens(tokens, log_probs)
        return True

    def text(self, text: str) -> None:
        """Take new text."""
        if self._chars_again >= 0:
            known = min(self._chars - self._chars_again, len(text))
            self._chars_again += known
            if self._chars_again == self._chars:
                self._chars_again = -1
            text = text[known:]
        self._chars += len(text)
        if text:
            self.reader.text(text)

    def contradicts(self, ended: Ended) -> bool:
        """Whether an end comes before tokens that the client has already."""
        return ended.failure is None and self._repeated >= 0

    def ended(self, ended: Ended) -> None:
        """Take the end."""
        if ended.text:
            self.text(ended.text)
        self.reader.ended(RequestEnd.of(ended))

    def fail(self, kind: str, text: str) -> None:
        """End it with an error that the client found itself."""
        self.reader.ended(RequestEnd("error", (kind, text)))

    def why_lost(self) -> str:
        """The error text for a further attempt with other tokens."""
        return (
            f"its replica was lost, and another one continues otherwise than the "
            f"{len(self.generated) // TOKEN_BYTES} tokens that were delivered: near ties fall "
            "differently in other batches below float32."
        )
