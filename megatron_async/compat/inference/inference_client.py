"""`InferenceClient`: Megatron's client, over this project's coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, override

import msgspec
import torch
from megatron.core.inference.async_stream import STOP_ITERATION
from megatron.core.inference.async_stream import AsyncStream as MegatronStream
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async.compat.conversions.coordinated_states import Signal
from megatron_async.compat.conversions.coordinator_service import (
    OF_PROMPT,
    MegatronParamsMessage,
)
from megatron_async.errors import ConfigurationError, CoordinatorLost, RequestError
from megatron_async.names_of_megatron import NamesOfMegatron
from megatron_async.requests.sampling_params import SamplingParams as OwnParams
from megatron_async.server.answers.log_prob_json import places
from megatron_async.serving.connection import check_sendable
from megatron_async.serving.messages import UNSENDABLE, Ended, Generate, encode
from megatron_async.serving.readers import TokenLogProbs, TokenReader
from megatron_async.serving.token_client import TokenClient, checked_traceparent
from megatron_async.text.tokenizer import Tokenizer

logger = logging.getLogger("megatron_async")

RETRY_S = 0.05
"""Between two looks whether a coordinator listens."""
LAST_WORDS_S = 2.0
"""How long a client whose event loop ends goes on to send what it was told."""

type Answer = DynamicInferenceRequest | dict[str, Any]
"""A request at its end, or what `serialize` makes of it."""


class _Wire(TokenClient):
    """Sends messages that were made elsewhere."""

    def send_message(self, message: Generate, reader: _Reply) -> None:
        """Send a request over the connection that is there."""
        self._send(message, reader.params, reader)


class _Reply(TokenReader):
    """What comes of one request: its end, with the whole request in it, tokens too."""

    params = OwnParams()
    """Log probs come with the request itself, and not with its tokens."""

    def __init__(self, request_id: int, future: asyncio.Future[Answer], deserialize: bool) -> None:
        super().__init__()
        self._request_id = request_id
        self._future = future
        self._deserialize = deserialize
        self._begun_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it."""
        return self._future.done()

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._future.cancel()

    def when_over(self, call: Callable[[asyncio.Future[Answer]], None]) -> None:
        """Call this at its end."""
        self._future.add_done_callback(call)

    def ended(self, end: Ended) -> None:
        """The request has ended. Its waiter gets whatever is raised here, too: nobody else tells
        it."""
        if self._future.done():
            return
        try:
            self._future.set_result(self._answer(end))
        except Exception as error:
            self._future.set_exception(error)

    def _answer(self, end: Ended) -> Answer:
        if end.record is None:
            raise end.error or ConfigurationError(
                f"the replica {end.replica!r} was not started by Megatron's engine, and does "
                "not answer in Megatron's form: use megatron_async.serving.client."
            )
        reply: dict[str, Any] = msgspec.msgpack.decode(end.record)
        reply["request_id"] = self._request_id
        reply["latency"] = time.perf_counter() - self._begun_s
        return DynamicInferenceRequest.deserialize(reply) if self._deserialize else reply


class AsyncStream(MegatronStream):  # type: ignore[misc, unused-ignore]
    """Megatron's stream, with what main's has beside 0.19's: `async for`, `aclose`, `request_id`.
    It gives `{"partial": ...}` as tokens come, and `{"final": request}` once at last."""

    @property
    def request_id(self) -> int:
        """The request of this stream, for `InferenceClient.abort_request`."""
        return int(self._request_id)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> dict[str, Any]:
        item = await self._queue.get()
        if item is STOP_ITERATION:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return dict(item)

    async def aclose(self) -> None:
        """Abort the request, if it has not ended."""
        if not self.finished:
            self._cancel()


class _StreamReply(_Reply):
    """What comes of a request that is streamed. `told` is called when there is something new."""

    def __init__(
        self,
        stream: AsyncStream,
        params: SamplingParams,
        deserialize: bool,
        told: Callable[[_StreamReply], None],
    ) -> None:
        ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        super().__init__(stream.request_id, ended, deserialize)
        self._stream = stream
        self._told = told
        self._interval = checked_interval(getattr(params, "streaming_interval", 1))
        words = [] if params.detokenize_stop_sequence else params.stop_words or []
        # A token has a byte or more: so many may be the beginning of a stop word, or all of it.
        self._held = max((len(word.encode()) for word in words), default=0)
        self.params = OwnParams(
            return_log_probs=params.return_log_probs, top_n_logprobs=params.top_n_logprobs
        )
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._top_n: list[dict[str, float]] = []
        self._of_prompt: dict[str, Any] = {}
        self._name_of: Callable[[int], str] = str

    def name_tokens(self, tokenizer: Tokenizer | None) -> None:
        """Alternatives are called by their texts, if there is a tokenizer for them."""
        if tokenizer is not None:
            self._name_of = lambda token: tokenizer.detokenize([token])

    @override
    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        self._tokens += tokens.tolist()
        if log_probs is not None:
            self._log_probs += log_probs.chosen.tolist()  # sync-ok: NumPy
            for _, _, found in places(tokens.tolist(), log_probs, self.params.top_n_logprobs):
                named: dict[str, float] = {}
                for token, value in found:  # of two with the same text, the likelier stays
                    named.setdefault(self._name_of(token), value)
                self._top_n.append(named)
        self._told(self)

    @override
    def hear_text(self, text: str) -> None:
        if text.startswith(OF_PROMPT):
            self._of_prompt = msgspec.json.decode(text.removeprefix(OF_PROMPT))

    @override
    def ended(self, end: Ended) -> None:
        super().ended(end)
        self.tell()
        if self._stream.finished:
            return
        if (error := self._future.exception()) is not None:
            self._stream.finish(error)
            return
        self._stream.put({"final": self._future.result()})
        self._stream.finish()

    def tell(self) -> None:
        """Give the stream what has come, if it is enough for a partial."""
        count = len(self._tokens) - self._held
        if count < self._interval or self._stream.finished:
            return
        given: dict[str, Any] = {
            "request_id": self._request_id, "new_tokens": self._tokens[:count]
        }  # fmt: skip
        if self.params.return_log_probs:
            given["new_log_probs"] = self._log_probs[:count]
            given["new_top_n_logprobs"] = self._top_n[:count]
            given |= self._of_prompt
        for taken in (self._tokens, self._log_probs, self._top_n):
            del taken[:count]
        self._of_prompt = {}
        self._stream.put({"partial": given})


def checked_interval(value: Any) -> int:
    """Main's `SamplingParams.streaming_interval`: fewest new tokens of a partial.

    Raises:
        RequestError: it is no whole number from 1 on.
    """
    if type(value) is not int or value < 1:
        raise RequestError(f"streaming_interval={value!r} must be an integer of 1 or more.")
    return value


class InferenceClient(NamesOfMegatron):
    """Sends requests and signals to the engines behind a coordinator, from an event loop.

    What is sent goes out in the order of the calls, none of which waits. Calls are Megatron-Core
    0.19's. Signals are for all engines; `engine.wait_until` says when they have followed, and one
    that they cannot follow is ignored, with a warning.

    Args:
        inference_coordinator_address: as `start_listening_to_data_parallel_coordinator` returns it.
        deserialize: answer with requests; False: with dictionaries, as `serialize` makes them.

    Attributes:
        completion_futures, streams: of unfinished requests, by id.
        next_request_id: of the next request.
    """

    def __init__(self, inference_coordinator_address: str, deserialize: bool = False) -> None:
        self.deserialize = deserialize
        self.completion_futures: dict[int, asyncio.Future[Answer]] = {}
        self.streams: dict[int, AsyncStream] = {}
        self.next_request_id = 0
        self._replies: dict[int, _Reply] = {}
        self._with_news: set[_StreamReply] = set()
        self._address = inference_coordinator_address
        self._outbox: asyncio.Queue[tuple[Generate, _Reply] | dict[str, Any]] = asyncio.Queue()
        self._wire: _Wire | None = None
        self._questions: set[asyncio.Task[None]] = set()
        self._tokenizer: Tokenizer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.listener_task: asyncio.Task[None] | None = None

    def start(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        connect_timeout_seconds: float | None = None,
    ) -> None:
        """Begin to send, on `loop` or the running one; a coordinator may still be starting.
        `connect_timeout_seconds` is main's: wait so long until the coordinator listens.

        Raises:
            RuntimeError: no event loop runs, and none was given.
            TimeoutError: it does not listen in time.
        """
        if connect_timeout_seconds is not None:
            _wait_for_listener(self._address, connect_timeout_seconds)
        self._loop = loop or asyncio.get_running_loop()
        self._wire = _Wire(self._address)
        self._wire.after_message = self._tell_streams
        self.listener_task = self._loop.create_task(self._send_all(self._wire))

    def add_request(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        sampling_params: SamplingParams,
        *,
        multi_modal_data: Any = None,
        traceparent: str = "",
    ) -> asyncio.Future[Answer]:
        """Send a request.

        Args:
            prompt: text, token ids, or a tensor of them, int64 `[prompt length]`, host memory.
            sampling_params: Megatron's.
            multi_modal_data: main's; refused, unless None or empty.
            traceparent: ours: of a trace; see `TokenClient.send`.

        Returns:
            a future of the request at its end, FAILED if the engine refused it. It raises what the
            service did: `CoordinatorLost`, `ReplicaLost`, `Overloaded`.

        Raises:
            RequestError: something in it cannot be sent.
            RuntimeError: the client has not been started, or no event loop runs.
        """
        self._check_is_started()
        request_id = self.next_request_id
        message = _message(prompt, sampling_params, multi_modal_data)
        message.traceparent = checked_traceparent(traceparent)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.completion_futures[request_id] = future
        future.add_done_callback(lambda _: self.completion_futures.pop(request_id, None))
        self._submit(message, _Reply(request_id, future, self.deserialize))
        return future

    def add_request_streaming(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        sampling_params: SamplingParams,
        *,
        multi_modal_data: Any = None,
    ) -> AsyncStream:
        """Main's: send a request whose tokens are given as they come; arguments and errors are
        those of `add_request`. `streaming` is set in `sampling_params`.

        Returns:
            an iterator of `{"partial": {"request_id", "new_tokens"}}`, each with
            `streaming_interval` tokens or more, and at last `{"final": request}`. With log probs
            asked for also "new_log_probs" and "new_top_n_logprobs" (by text, or by id where no
            tokenizer can be sent), and in the first one "prompt_log_probs" and
            "prompt_top_n_logprobs", unless skipped. Tokens that may become a stop word wait. What
            the service raises is raised by the iterator.
        """
        self._check_is_started()
        request_id = self.next_request_id
        sampling_params.streaming = True  # type: ignore[attr-defined, unused-ignore]
        message = _message(prompt, sampling_params, multi_modal_data)
        stream = AsyncStream(request_id, partial(self.abort_request, request_id), loop=self._loop)
        told = self._with_news.add
        reply = _StreamReply(stream, sampling_params, self.deserialize, told)
        self.streams[request_id] = stream
        self._submit(message, reply)
        return stream

    def abort_request(self, request_id: int) -> None:
        """Main's: end a request: its stream ends, its future is cancelled, the engine is told. One
        that has ended stays as it is."""
        reply = self._replies.pop(int(request_id), None)
        if reply is None:
            return
        reply.cancel()
        if (stream := self.streams.pop(int(request_id), None)) is not None:
            stream.finish()
        if reply.number >= 0 and self._wire is not None:
            self._wire.abort(reply)

    def pause_engines(self) -> None:
        """All engines stand still, requests wait: PAUSED."""
        self._signal(Signal.PAUSE)

    def unpause_engines(self) -> None:
        """Take `pause_engines` back: RUNNING."""
        self._signal(Signal.UNPAUSE)

    def suspend_engines(self) -> None:
        """Paused engines give memory back, as `kv_cache_management_mode` says: SUSPENDED."""
        self._signal(Signal.SUSPEND)

    def resume_engines(self) -> None:
        """Take `suspend_engines` back: RESUMED, and still paused."""
        self._signal(Signal.RESUME)

    def stop_engines(self) -> None:
        """Paused or suspended engines leave the coordinator: STOPPED. Their requests end here."""
        self._signal(Signal.STOP)

    def set_generation_epoch(self, generation_epoch: int) -> None:
        """The weights are those of this generation from now on."""
        self._signal(Signal.SET_GENERATION_EPOCH, generation_epoch)

    def start_cuda_profiler(self) -> None:
        """Start CUDA's profiler in all engines' processes."""
        self._signal(Signal.START_CUDA_PROFILER)

    def stop_cuda_profiler(self) -> None:
        """Stop CUDA's profiler in all engines' processes."""
        self._signal(Signal.STOP_CUDA_PROFILER)

    def shutdown_coordinator(self) -> None:
        """End the coordinator, not the engines."""
        self._check_is_started()
        self._outbox.put_nowait({"what": "shutdown"})

    def stop(self) -> None:
        """Disconnect, after what was sent before; unfinished requests are cancelled."""
        for reply in list(self._replies.values()):
            reply.cancel()
        for stream in list(self.streams.values()):
            stream.finish()
        if self.listener_task is not None and not self.listener_task.done():
            self._outbox.put_nowait({})

    # ---- Behind the calls --------------------------------------------------------------------

    def _check_is_started(self) -> None:
        if self.listener_task is None:
            raise RuntimeError("the client has not been started: call start() first.")

    def _submit(self, message: Generate, reply: _Reply) -> None:
        request_id, self.next_request_id = self.next_request_id, self.next_request_id + 1
        self._replies[request_id] = reply

        def forget(_: asyncio.Future[Answer]) -> None:
            self._replies.pop(request_id, None)
            self.streams.pop(request_id, None)

        reply.when_over(forget)
        self._outbox.put_nowait((message, reply))

    def _tell_streams(self) -> None:
        news, self._with_news = self._with_news, set()
        for reply in news:
            reply.tell()

    def _signal(self, signal: Signal, value: Any = None) -> None:
        self._check_is_started()
        self._outbox.put_nowait({"what": "signal", "signal": signal.value, "value": value})

    async def _send_all(self, wire: _Wire) -> None:
        """Send what the calls put into the outbox, until `stop`."""
        try:
            with contextlib.suppress(CoordinatorLost):  # what is sent says so
                await wire.open()
            while item := await self._outbox.get():
                await self._send(wire, item)
        except asyncio.CancelledError:
            # A script's last line may be `stop`: what was said before it is said all the same.
            async with asyncio.timeout(LAST_WORDS_S):
                while not self._outbox.empty() and (item := self._outbox.get_nowait()):
                    await self._send(wire, item)
            raise
        finally:
            for task in self._questions:
                task.cancel()
            await wire.close()

    async def _send(self, wire: _Wire, item: tuple[Generate, _Reply] | dict[str, Any]) -> None:
        if isinstance(item, dict):
            await self._tell(wire, item)
            return
        message, reply = item
        if reply.is_over:
            return
        try:
            card = await wire.card()  # waits for a connection, and the first engine
            if isinstance(reply, _StreamReply) and reply.params.top_n_logprobs:
                if self._tokenizer is None:
                    self._tokenizer = await asyncio.to_thread(card.tokenizer)
                reply.name_tokens(self._tokenizer)
            if not reply.is_over:
                wire.send_message(message, reply)
        except Exception as error:
            reply.fail(type(error).__name__, str(error))

    async def _tell(self, wire: _Wire, fields: dict[str, Any]) -> None:
        """Send a signal without waiting for its answer; `shutdown` alone waits."""
        asking = asyncio.ensure_future(self._ask(wire, **fields))
        if fields["what"] == "shutdown":
            await asking
            return
        self._questions.add(asking)
        asking.add_done_callback(self._questions.discard)
        await asyncio.sleep(0)  # now it is sent

    async def _ask(self, wire: _Wire, what: str, **fields: Any) -> None:
        try:
            await wire.ask(what, **fields)
        except ValueError as error:
            with contextlib.suppress(KeyError):
                what = fields["signal"]
            logger.warning("%s was not followed: %s", what, error)
        except Exception as error:
            logger.warning("%s could not be told: %s", fields.get("signal", what), error)


def _wait_for_listener(address: str, timeout_s: float) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            longest_s = max(end_s - time.monotonic(), RETRY_S)
            socket.create_connection((host.strip("[]"), int(port)), longest_s).close()
            return
        except OSError as error:
            if time.monotonic() >= end_s:
                raise TimeoutError(
                    f"no coordinator listened at {address} within {timeout_s:g} s: start it first, "
                    "or raise connect_timeout_seconds."
                ) from error
        time.sleep(RETRY_S)


def refuse_media(given: Any) -> None:
    """Raise RequestError if main's `multi_modal_data` has anything."""
    if given:
        raise RequestError("multi_modal_data is not served: leave it out, only text is.")


def _message(prompt: Any, params: SamplingParams, media: Any) -> Generate:
    refuse_media(media)
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.tolist()
    if not isinstance(prompt, str):
        prompt = list(prompt)
    limit = params.num_tokens_to_generate
    try:
        sent = encode(MegatronParamsMessage(params.serialize(), limit))
        message = Generate(0, prompt, msgspec.Raw(sent), limit, 0)
        check_sendable(message)
    except UNSENDABLE as error:
        raise RequestError(f"the request cannot be sent: {error}") from error
    return message
