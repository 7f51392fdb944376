"""`SentRequests`: a client's unfinished requests; divides a step's message among their readers.

A request whose replica is lost is served again from its beginning. The coordinator keeps no tokens:
the client compares repeated tokens with those that it has, and gives its reader only new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_async.errors import ReplicaLost
from megatron_async.serving.messages import Ended, StepTokens
from megatron_async.serving.readers import RequestEnd, TokenLogProbs, TokenReader
from megatron_async.serving.step_arrays import StepArrays

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


logger = logging.getLogger("megatron_async")


class SentRequests:
    """Unfinished requests by number; on one event loop.

    Args:
        abort: ends a request at its replica, by its number.
    """

    def __init__(self, abort: Callable[[int], None]) -> None:
        self._abort = abort
        self._requests: dict[int, SentRequest] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def put(self, number: int, request: SentRequest) -> None:
        """From now on the request gets the messages for its number."""
        self._requests[number] = request

    def take(self, number: int) -> SentRequest | None:
        """Remove a request; None if there is none of this number."""
        return self._requests.pop(number, None)

    def again(self, number: int) -> None:
        """What follows of a request begins with its first token."""
        if (request := self._requests.get(number)) is not None:
            request.again()

    def fail_all(self, kind: str, text: str) -> None:
        """End all requests with an error.

        Args:
            kind: name of its class.
            text: its message.
        """
        requests, self._requests = self._requests, {}
        for request in requests.values():
            tell_end(request, kind, text)

    def hear(self, message: StepTokens) -> None:
        """Give readers the content of a message: first the tokens, then texts and ends. Numbers of
        unknown requests are ignored."""
        if message.numbers:
            self._give(message)
        for number, text in message.texts:
            self._give_text(number, text)
        for ended in message.ends:
            self._end(ended)

    def _give(self, message: StepTokens) -> None:
        """Give each reader its tokens: Python per row, hence written flat."""
        step, words = None, None
        if message.log_probs is not None:
            step = StepArrays.of(message)
            words = step.first_words()
        requests, tokens, first = self._requests, memoryview(message.tokens).cast("i"), 0
        # Without NumPy, whose functions take several times as long where caches are cold.
        numbers = memoryview(message.numbers).cast("q").tolist()
        counts = memoryview(message.counts).cast("i").tolist()
        if len(numbers) != len(counts) or min(counts) < 0 or sum(counts) != len(tokens):
            raise ValueError("numbers, counts and tokens do not fit together")
        for row, (number, count_) in enumerate(zip(numbers, counts, strict=True)):
            end = first + count_
            request = requests.get(number)
            if request is not None and count_:
                log_probs = None
                if words is not None and words[row] >= 0:
                    assert step is not None, "it has log probs"
                    assert step.words is not None, "likewise"
                    place = words[row]
                    log_probs = TokenLogProbs.of(
                        step.words[place : place + count_], step.top_n, request.top_n
                    )
                try:
                    if not request.tokens(tokens[first:end], log_probs):
                        self._drop(number, request, ReplicaLost.__name__, request.why_lost())
                except Exception as error:
                    self._fault(number, request, error)
            first = end

    def _give_text(self, number: int, text: str) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        try:
            request.text(text)
        except Exception as error:
            self._fault(number, request, error)

    def _fault(self, number: int, request: SentRequest, error: Exception) -> None:
        """An exception of a reader fails only its own request."""
        logger.error(
            "A reader of a request's tokens failed; the request is aborted.", exc_info=error
        )
        self._drop(number, request, type(error).__name__, str(error))

    def _drop(self, number: int, request: SentRequest, kind: str, text: str) -> None:
        self._abort(number)
        self._requests.pop(number, None)
        tell_end(request, kind, text)

    def _end(self, ended: Ended) -> None:
        request = self._requests.pop(ended.number, None)
        if request is None:
            return
        if request.contradicts(ended):
            tell_end(request, ReplicaLost.__name__, request.why_lost())
            return
        try:
            request.ended(ended)
        except Exception:
            logger.exception("A reader of a request's tokens failed at its end.")


def tell_end(request: SentRequest, kind: str, text: str) -> None:
    """End a request with an error that the client found; a fault of its reader is logged.

    Args:
        request: that no reader was told the end of.
        kind: name of the error's class.
        text: its message.
    """
    try:
        request.fail(kind, text)
    except Exception:
        logger.exception("A reader of a request's tokens failed at its end.")
