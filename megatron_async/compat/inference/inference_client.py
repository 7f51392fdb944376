"""`InferenceClient`: Megatron's client, over this project's coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async.compat.conversions.coordinated_states import Signal
from megatron_async.compat.conversions.coordinator_service import MegatronParamsMessage
from megatron_async.errors import ConfigurationError, CoordinatorLost, RequestError
from megatron_async.requests.sampling_params import SamplingParams as OwnParams
from megatron_async.serving.connection import check_sendable
from megatron_async.serving.messages import UNSENDABLE, Ended, Generate, encode
from megatron_async.serving.readers import TokenReader
from megatron_async.serving.token_client import TokenClient, checked_traceparent

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
        self._send(message, OwnParams(), reader)


class _Reply(TokenReader):
    """What comes of one request: its end, with the whole request in it, tokens too."""

    def __init__(
        self, request_id: int, future: asyncio.Future[Answer], deserialize: bool, begun_s: float
    ) -> None:
        super().__init__()
        self._request_id = request_id
        self._future = future
        self._deserialize = deserialize
        self._begun_s = begun_s

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it."""
        return self._future.done()

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


class InferenceClient:
    """Sends requests and signals to the engines behind a coordinator, from an event loop.

    What is sent goes out in the order of the calls, none of which waits. Calls are Megatron-Core
    0.19's. Signals are for all engines; `engine.wait_until` says when they have followed, and one
    that they cannot follow is ignored, with a warning.

    Args:
        inference_coordinator_address: as `start_listening_to_data_parallel_coordinator` returns it.
        deserialize: answer with requests; False: with dictionaries, as `serialize` makes them.

    Attributes:
        completion_futures: of unfinished requests, by id.
        next_request_id: of the next request.
    """

    def __init__(self, inference_coordinator_address: str, deserialize: bool = False) -> None:
        self.deserialize = deserialize
        self.completion_futures: dict[int, asyncio.Future[Answer]] = {}
        self.next_request_id = 0
        self._address = inference_coordinator_address
        self._outbox: asyncio.Queue[tuple[Generate, _Reply] | dict[str, Any]] = asyncio.Queue()
        self._wire: _Wire | None = None
        self._questions: set[asyncio.Task[None]] = set()
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
        self.listener_task = self._loop.create_task(self._send_all(self._wire))

    def add_request(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        sampling_params: SamplingParams,
        *,
        traceparent: str = "",
    ) -> asyncio.Future[Answer]:
        """Send a request.

        Args:
            prompt: text, token ids, or a tensor of them, int64 `[prompt length]`, host memory.
            sampling_params: Megatron's.
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
        message = _message(prompt, sampling_params)
        message.traceparent = checked_traceparent(traceparent)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        reply = _Reply(request_id, future, self.deserialize, time.perf_counter())
        self.next_request_id += 1
        self.completion_futures[request_id] = future
        future.add_done_callback(lambda _: self.completion_futures.pop(request_id, None))
        self._outbox.put_nowait((message, reply))
        return future

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
        for future in list(self.completion_futures.values()):
            future.cancel()
        if self.listener_task is not None and not self.listener_task.done():
            self._outbox.put_nowait({})

    # ---- Behind the calls --------------------------------------------------------------------

    def _check_is_started(self) -> None:
        if self.listener_task is None:
            raise RuntimeError("the client has not been started: call start() first.")

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
            await wire.card()  # waits for a connection, and the first engine
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


def _message(prompt: Any, params: SamplingParams) -> Generate:
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
