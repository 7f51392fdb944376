"""`ReplicaTexts`: texts of a tokenizer that cannot be sent, made outside of the engine's thread.

A tokenizer of a user's own class cannot be sent to clients. So its replica makes the texts, in a
separate thread, and sends a step's message when the texts are ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.messages import Ended, StepTokens
from megatron_async.serving.step_arrays import StepArrays
from megatron_async.text.token_text import TokenText


class ReplicaTexts:
    """Adds texts to messages, in their order. `send` gets the messages, on the event loop that made
    this object; `tokenizer` is called in another thread than the engine's."""

    def __init__(self, tokenizer: Any, send: Callable[[StepTokens], None]) -> None:
        self._tokenizer = tokenizer
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "replica-texts")
        self._texts: dict[int, TokenText | Exception] = {}
        """Texts of unfinished requests; the error if the tokenizer has failed."""
        self._epoch = 0

    def begin(
        self,
        number: int,
        prompt: str | Sequence[int],
        params: SamplingParams,
        told: Sequence[int] = (),
    ) -> None:
        """A request begins, or goes on behind tokens whose text is `told`."""
        self._thread.submit(self._begin, number, prompt, params, told)

    def move(self, number: int, send: Callable[[], None]) -> None:
        """A request goes: `send` is called behind its texts."""

        def behind() -> None:
            self._texts.pop(number, None)
            self._loop.call_soon_threadsafe(send)

        self._thread.submit(behind)

    def tell(self, message: StepTokens) -> None:
        """Send a message with its texts."""
        self._thread.submit(self._tell, message, self._epoch)

    def forget(self) -> None:
        """Nobody wants to hear any more what there is."""
        self._epoch += 1
        self._thread.submit(self._texts.clear)

    def close(self) -> None:
        """End the thread, without waiting for what it does."""
        self._epoch += 1
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- In the thread -----------------------------------------------------------------------

    def _begin(
        self, number: int, prompt: str | Sequence[int], params: SamplingParams, told: Sequence[int]
    ) -> None:
        try:
            text = self._texts[number] = TokenText(self._tokenizer, params, prompt)
            for token in told:
                text.push([token])
        except Exception as error:  # the tokenizer's own: this request's alone
            self._texts[number] = error

    def _tell(self, message: StepTokens, epoch: int) -> None:
        step, first = StepArrays.of(message), 0
        for number, count in zip(step.numbers.tolist(), step.counts.tolist(), strict=True):
            tokens = step.tokens[first : first + count].tolist()
            first += count
            if text := self._push(number, tokens):
                message.texts.append((number, text))
        message.ends = list(map(self._end, message.ends))
        self._loop.call_soon_threadsafe(self._deliver, message, epoch)

    def _push(self, number: int, tokens: list[int]) -> str:
        text = self._texts.get(number)
        if not isinstance(text, TokenText):
            return ""
        try:
            return text.push(tokens)
        except Exception as error:  # the tokenizer's own: this request's alone
            self._texts[number] = error
            return ""

    def _end(self, ended: Ended) -> Ended:
        text = self._texts.pop(ended.number, None)
        try:
            if isinstance(text, Exception):
                raise text
            if text is None:
                return ended
            rest = text.end(ended.finish_reason, ended.stop_words_from)
            return msgspec.structs.replace(ended, text=rest, stop_word=text.stop_word)
        except Exception as error:
            failure = ended.failure or (type(error).__name__, str(error))
            return msgspec.structs.replace(ended, finish_reason="error", failure=failure)

    def _deliver(self, message: StepTokens, epoch: int) -> None:
        if epoch == self._epoch:
            self._send(message)
