"""Streaming: a request's tokens and text while they are made, for readers of any speed.

A stream holds no queue. The engine's books are the buffer: a reader takes all that has been booked
since it last looked, so a slow one gets larger chunks, and never holds up a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from megatron_async.detokenize import IncrementalDetokenizer
from megatron_async.inference_request import DynamicInferenceRequest
from megatron_async.stop_words import held_back


@dataclass(frozen=True)
class StreamChunk:
    """What is new of a request.

    Attributes:
        tokens: generated token ids.
        text: text that nothing can change any more, or None without a tokenizer. Incomplete
            characters, and what may become a stop word, wait for later chunks. The texts of all
            chunks together are the request's `generated_text`.
    """

    tokens: list[int]
    text: str | None


class RequestStream(AsyncIterator[StreamChunk]):
    """`async for chunk in stream`, until the request has ended.

    Made by `DynamicInferenceEngine.stream`; it lives on the event loop that steps the engine. If
    the request fails, its error is raised behind the last chunk.

    Args:
        request: the request.
        booked_tokens: its generated tokens so far.
    """

    def __init__(
        self,
        request: DynamicInferenceRequest,
        booked_tokens: Callable[[DynamicInferenceRequest], list[int]],
    ) -> None:
        self.request = request
        self._booked_tokens = booked_tokens
        self._news = asyncio.Event()
        self._num_read = 0
        self._is_over = False
        self._detokenizer: IncrementalDetokenizer | None = None
        if request.detokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(request.detokenizer)
        self._held_back = held_back(request.sampling_params.stop_words or ())
        self._settled = request.prompt_text if request.sampling_params.echo else ""
        self._num_sent = 0

    def notify(self) -> None:
        """Wake the reader: a step was booked, or the request has ended."""
        self._news.set()

    async def __anext__(self) -> StreamChunk:
        while not self._is_over:
            self._news.clear()
            self._is_over = self.request.finish_reason is not None
            tokens = self._booked_tokens(self.request)[self._num_read :]
            if tokens or self._is_over:
                self._num_read += len(tokens)
                chunk = StreamChunk(tokens, self._new_text(tokens))
                if chunk.tokens or chunk.text:
                    return chunk
                continue
            await self._news.wait()
        if self.request.error is not None:
            raise self.request.error
        raise StopAsyncIteration

    def _new_text(self, tokens: list[int]) -> str | None:
        if self._detokenizer is None:
            return None
        if self._is_over:
            new = (self.request.generated_text or "")[self._num_sent :]
        else:
            self._settled += "".join(map(self._detokenizer.push, tokens))
            # Cut from the front as it is sent: only what is held back is kept.
            end = max(len(self._settled) - self._held_back, 0)
            new, self._settled = self._settled[:end], self._settled[end:]
        self._num_sent += len(new)
        return new
