"""`TrackedRequest`: what a request was asked for, and whether its end is right."""

from __future__ import annotations

import asyncio

from megatron_async import DynamicInferenceEngine, Status
from megatron_async.errors import RequestAborted, RequestError, StepFailed
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.streaming import RequestStream, StreamChunk
from tests.functional_tests.fuzz.fuzz_requests import COMPARED, CUT_SHORT, Ask, equal
from tests.functional_tests.fuzz.serial_answers import SerialAnswers


class TrackedRequest:
    """A request from its `add_request` to its end.

    Args:
        engine: that serves it, or has refused it.
        ask: what for.
        future: from `add_request`.

    Attributes:
        request: the engine's.
        emitted: tokens that steps have reported, in order.
        is_aborted: whether its owner has aborted it.
        may_fail: whether it may end with a step that fails.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        ask: Ask,
        future: asyncio.Future[DynamicInferenceRequest],
    ) -> None:
        self._ask = ask
        new_tokens = ask.sampling["num_tokens_to_generate"]
        self._is_refused = not _fits(engine, len(ask.prompt), new_tokens)
        self.request = future.result() if future.done() else engine.get_request(ask.request_id)
        self.future = future
        self.emitted: list[int] = []
        self.is_aborted = self.may_fail = False
        self._readers: list[tuple[list[StreamChunk], asyncio.Task[None]]] = []

    def read(self, stream: RequestStream, loop: asyncio.AbstractEventLoop) -> None:
        """Read `stream` whenever `loop` runs."""
        chunks: list[StreamChunk] = []
        self._readers.append((chunks, loop.create_task(_read(stream, chunks))))

    @property
    def readers(self) -> list[asyncio.Task[None]]:
        """Tasks that read its streams."""
        return [task for _, task in self._readers]

    def check_end(self, serial: SerialAnswers) -> None:
        """Check the request and its future, when it is reported as ended."""
        request = self.request
        assert self.future.done(), f"nobody was told of {request}"
        assert self.future.cancelled() or self.future.result() is request
        if self._is_refused:
            assert isinstance(request.error, RequestError), request
            assert request.finish_reason == "error"
            return
        assert request.generated_tokens == self.emitted
        if self.may_fail and isinstance(request.error, StepFailed):
            assert (request.status, request.finish_reason) == (Status.FAILED, "error")
            answer = serial.answer(self._ask)
            assert self.emitted == answer.generated_tokens[: len(self.emitted)]
            return
        if self.is_aborted:
            answer = serial.answer(self._ask, len(self.emitted))
            assert request.finish_reason == "aborted"
            assert isinstance(request.error, RequestAborted)
            for name in CUT_SHORT:
                found, expected = COMPARED[name](request), COMPARED[name](answer)
                if found is not None and expected is not None:
                    expected = expected[: len(request.generated_tokens)]
                assert equal(found, expected), (name, found, expected)
            return
        answer = serial.answer(self._ask)
        assert request.error is None, request.error
        assert request.status == Status.COMPLETED
        for name, output in COMPARED.items():
            found, expected = output(request), output(answer)
            assert equal(found, expected), (name, found, expected)

    def check_readers(self) -> None:
        """Check what the readers got, when the event loop has run."""
        for chunks, task in self._readers:
            assert task.done(), f"a reader still waits for {self.request}"
            if self.is_aborted:
                assert isinstance(task.exception(), RequestAborted)
            elif isinstance(self.request.error, StepFailed):
                assert isinstance(task.exception(), StepFailed)
            else:
                assert task.exception() is None, task.exception()
            tokens = [token for chunk in chunks for token in chunk.tokens]
            assert tokens == self.request.generated_tokens
            text = "".join(chunk.text or "" for chunk in chunks)
            assert text == self.request.generated_text


async def _read(stream: RequestStream, chunks: list[StreamChunk]) -> None:
    async for chunk in stream:
        chunks.append(chunk)


def _fits(engine: DynamicInferenceEngine, prompt: int, new_tokens: int) -> bool:
    """Whether the engine must serve a request of this size: it may split the prompt, or a step
    holds it; and it may end alone in the pool. (Its last token needs no place in the cache.)"""
    config, blocks = engine.context.config, engine.context.blocks.total
    splits = config.enable_chunked_prefill or prompt <= config.max_tokens
    return splits and prompt + new_tokens - 1 <= blocks * config.block_size_tokens
