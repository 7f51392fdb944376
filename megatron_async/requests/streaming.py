"""Streaming: a request's tokens and text while they are made, for readers of any speed.

A stream has no queue. The request's booked tokens are the buffer: a reader takes all tokens booked
since its last read, so a slow reader gets larger chunks, and never delays a step. A reader keeps
its position, so the cost of a chunk depends on its new tokens, not on the answer's length.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.moved_request import MOVED
from megatron_async.requests.stream_wakeups import StreamWakeups
from megatron_async.text.token_text import TokenText


class TokensOf(Protocol):
    """The books: they hold the tokens of requests that run."""

    def tokens_since(self, request_id: int, first: int) -> list[int] | None:
        """Booked generated tokens of a request from its `first` on; None if it does not run."""

    def keep_tokens(self) -> None:
        """Store its booked tokens with each request that runs (`generated_tokens`)."""


class StreamChunk(msgspec.Struct, frozen=True):
    """The new tokens and text of a request. (A `Struct` is made in a fifth of a dataclass's time,
    without a call of a function in Python.)

    Attributes:
        tokens: generated token ids.
        text: text that later tokens cannot change, or None without a tokenizer. Incomplete
            characters, and a possible start of a stop word, wait for later chunks. The texts of all
            chunks together are the request's `generated_text`.
    """

    tokens: list[int]
    text: str | None


class RequestStream(AsyncIterator[StreamChunk]):
    """`async for chunk in stream`, until the request has ended.

    Made by `DynamicInferenceEngine.stream`; it lives on the event loop that steps the engine. The
    first token comes at once, and so does the end. In between, waiting readers are woken together
    every few milliseconds (`stream_wakeups.WAKE_EVERY_S`), and get all new tokens as one chunk. If
    the request fails, its error is raised after the last chunk.

    Args:
        request: the request.
        booked: holds its tokens while it runs.
        readers: where a reader waits.
        tokenizer: makes the text; None without one.
    """

    def __init__(
        self,
        request: DynamicInferenceRequest,
        booked: TokensOf,
        readers: StreamWakeups,
        tokenizer: Any,
    ) -> None:
        self.request = request
        self._booked = booked
        self._readers = readers
        self._num_read = 0
        self._seen = -1
        """`StreamWakeups.bookings` at the last look."""
        self._is_over = False
        self._text: TokenText | None = None
        if tokenizer is not None:
            prompt = request.prompt
            given = request.prompt_tokens.tolist() if prompt is None else prompt
            self._text = TokenText(tokenizer, request.sampling_params, given)
        if request.num_moved:  # its stream on another engine has had these
            self._num_read = request.num_moved
            if self._text is not None:
                self._text.push(request.generated_tokens[: request.num_moved])

    async def __anext__(self) -> StreamChunk:
        # Every call of a function here is one more for each token of each stream.
        request, readers, text = self.request, self._readers, None
        while not self._is_over:
            self._is_over = request.finish_reason is not None
            if self._is_over or self._seen != readers.bookings:
                self._seen = readers.bookings
                tokens, first = None, self._num_read
                if not self._is_over:
                    tokens = self._booked.tokens_since(request.request_id, first)
                if tokens is None:
                    tokens = request.generated_tokens[first:]
                if self._text is not None and (tokens or self._is_over):
                    text = self._text.push(tokens)
                    if self._is_over and request.finish_reason != MOVED:
                        text += self._text.end(request.finish_reason, request.stop_words_from)
                if tokens or text:
                    self._num_read += len(tokens)
                    return StreamChunk(tokens, text)
                continue
            waiter = readers.waiter(request.request_id)
            try:
                await waiter
            except BaseException:
                readers.gave_up(request.request_id, waiter)
                raise
        if request.error is not None:
            raise request.error
        raise StopAsyncIteration
