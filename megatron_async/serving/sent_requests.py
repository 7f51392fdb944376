"""`SentRequests`: a client's unfinished requests; divides a step's message among their readers.

A request whose replica is lost is served again from its beginning. The coordinator keeps no tokens:
the client compares repeated tokens with those that it has, and gives its reader only new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_async.errors import ReplicaLost
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.messages import StepTokens
from megatron_async.serving.readers import TokenLogProbs, TokenReader
from megatron_async.serving.step_arrays import StepArrays

logger = logging.getLogger("megatron_async")


class SentRequests:
    """Unfinished requests by number; on one event loop. `abort` ends a request at its replica, by
    its number."""

    def __init__(self, abort: Callable[[int], None]) -> None:
        self._abort = abort
        self._requests: dict[int, TokenReader] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def put(self, number: int, request: TokenReader, params: SamplingParams) -> None:
        """From now on the request gets the messages for its number."""
        request.number = number
        request.top_n = params.top_n_logprobs if params.return_log_probs else 0
        self._requests[number] = request

    def again(self, number: int) -> None:
        """What follows of a request begins with its first token."""
        if (request := self._requests.get(number)) is not None:
            request.again()

    def fail_all(self, kind: str, text: str) -> None:
        """End all requests with an error."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.fail(kind, text)

    def hear(self, message: StepTokens) -> None:
        """Give readers the content of a message: first the tokens, then texts and ends. Numbers of
        unknown requests are ignored."""
        if message.numbers:
            self._give(message)
        for number, text in message.texts:
            self._give_text(number, text)
        for ended in message.ends:
            if (request := self._requests.pop(ended.number, None)) is not None:
                request.hear_end(ended)

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
                    if not request.hear_tokens(tokens[first:end], log_probs):
                        self._drop(number, request, ReplicaLost.__name__, request.why_lost())
                except Exception as error:
                    self._fault(number, request, error)
            first = end

    def _give_text(self, number: int, text: str) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        try:
            request.hear_text(text)
        except Exception as error:
            self._fault(number, request, error)

    def _fault(self, number: int, request: TokenReader, error: Exception) -> None:
        """An exception of a reader fails only its own request."""
        logger.error(
            "A reader of a request's tokens failed; the request is aborted.", exc_info=error
        )
        self._drop(number, request, type(error).__name__, str(error))

    def _drop(self, number: int, request: TokenReader, kind: str, text: str) -> None:
        self._abort(number)
        self._requests.pop(number, None)
        request.fail(kind, text)
