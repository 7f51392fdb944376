"""`AsyncCoordinatorClient`: ask a coordinator's replicas, from an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import msgspec

from megatron_async.errors import CoordinatorLost, RequestError
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.connection import Connection, check_sendable
from megatron_async.serving.failures import exception_of
from megatron_async.serving.first_replica import FirstReplica
from megatron_async.serving.messages import (
    PROTOCOL,
    UNSENDABLE,
    Abort,
    Answer,
    Ask,
    Chunk,
    ClientHello,
    Completion,
    Ended,
    Generate,
    Goodbye,
    Pong,
    ToClient,
    TokenChunk,
    decode_for_client,
    encode,
)

Prompt = str | Sequence[int] | Any
"""Text, or token ids (list, NumPy array or CPU tensor)."""


class RemoteRequest(AsyncIterator[TokenChunk]):
    """A request that was sent: `await request.completion()`, and, if it is streamed,
    `async for chunk in request` before.

    Attributes:
        number: the client's.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._chunks: list[TokenChunk] = []
        self._news = asyncio.Event()
        self._completion: Completion | None = None
        self._lost: CoordinatorLost | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._completion is not None or self._lost is not None

    async def completion(self) -> Completion:
        """How it ended; `error` says why it failed.

        Raises:
            CoordinatorLost: before it ended.
        """
        while not self.is_over:
            self._news.clear()
            await self._news.wait()
        if self._completion is None:
            assert self._lost is not None
            raise self._lost
        return self._completion

    async def __anext__(self) -> TokenChunk:
        while not self._chunks:
            if self.is_over:
                completion = await self.completion()
                if completion.error is not None:
                    raise completion.error
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        chunks, self._chunks = self._chunks, []
        if len(chunks) == 1:
            return chunks[0]
        # A slow reader gets larger chunks.
        texts = [chunk.text for chunk in chunks if chunk.text is not None]
        tokens = [token for chunk in chunks for token in chunk.tokens]
        return TokenChunk(tokens, "".join(texts) if texts else None)

    def _hear(self, message: Chunk | Ended) -> None:
        if isinstance(message, Chunk):
            self._chunks.append(TokenChunk(message.tokens, message.text))
        else:
            self._completion = message.completion
        self._news.set()

    def _lose(self, error: CoordinatorLost) -> None:
        self._lost = error
        self._news.set()


class AsyncCoordinatorClient:
    """Sends requests to a coordinator; use it with `async with`.

    After the coordinator was lost, what was unfinished has failed with `CoordinatorLost`, and the
    next call connects again.

    Args:
        address: of the coordinator, as in "tcp://127.0.0.1:9500".
        connect_timeout_s: how long a call waits for a coordinator.
        replica_timeout_s: how long requests wait for the coordinator's first replica, which may
            still load its model. (Later ones wait in the coordinator; see docs/serving.md.)
    """

    def __init__(
        self, address: str, connect_timeout_s: float = 10.0, replica_timeout_s: float = 600.0
    ) -> None:
        self._address = address
        self._timeout_s = connect_timeout_s
        self._first_replica = FirstReplica(address, replica_timeout_s)
        self._connection: Connection[ToClient] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._numbers = count()
        self._requests: dict[int, RemoteRequest] = {}
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> AsyncCoordinatorClient:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        stream: bool = False,
    ) -> RemoteRequest:
        """Send one request.

        Args:
            prompt: text or token ids.
            sampling_params: defaults when None.
            priority: requests of higher priority go first.
            stream: its tokens come while they are made.

        Raises:
            CoordinatorLost: there is none.
            ReplicaLost: it has no replica, and none came within `replica_timeout_s`.
            RequestError: something in it cannot be sent.
        """
        params = sampling_params or SamplingParams()
        tokens = prompt if isinstance(prompt, str) else _token_ids(prompt)
        if type(priority) is not int:
            raise RequestError(f"priority={priority!r} is not allowed: it must be an integer.")
        request = RemoteRequest(next(self._numbers))
        message = Generate(
            request.number, tokens, msgspec.Raw(_encoded(params)), params.num_tokens_to_generate,
            priority, stream,
        )  # fmt: skip
        try:
            check_sendable(message)
        except UNSENDABLE as error:
            raise RequestError(f"the prompt cannot be sent: {error}") from error
        await self._first_replica.wait(self.stats)
        connection = await self._open()
        connection.send(message)
        self._requests[request.number] = request
        return request

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        raise_on_failure: bool = True,
    ) -> list[Completion]:
        """Generate for one prompt or many, all at once.

        Args:
            prompts: a text, a list of token ids, or a list of those.
            sampling_params: for all prompts, or one for each.
            raise_on_failure: raise when a request fails, and abort the others. False: the others
                are not affected, and a completion that failed has its `error`.

        Returns:
            a completion for each prompt, in order.

        Raises:
            CoordinatorLost: there is none, or it died.
            ReplicaLost: it has no replica, and none came within `replica_timeout_s`.
            Exception: whatever the first request that failed, in order of prompts, failed with; not
                with `raise_on_failure=False`.
        """
        batch = [prompts] if is_one_prompt(prompts) else list(prompts)
        if isinstance(sampling_params, Sequence):
            each: Sequence[SamplingParams | None] = sampling_params
        else:
            each = [sampling_params] * len(batch)
        if len(each) != len(batch):
            raise RequestError(
                f"{len(each)} sampling_params were given for {len(batch)} prompts: give one for "
                "all, or one for each."
            )
        requests: list[RemoteRequest] = []
        try:
            for prompt, params in zip(batch, each, strict=True):
                requests.append(await self.submit(prompt, params))
            completions = []
            for number, request in enumerate(requests):
                completions.append(await request.completion())
                error = completions[-1].error
                if error is not None and raise_on_failure:
                    if len(requests) > 1:
                        error.add_note(
                            f"This was prompt {number} of {len(requests)}; with "
                            "raise_on_failure=False the others go on, and it has an `error`."
                        )
                    raise error
            return completions
        except BaseException:
            for request in requests:
                self.abort(request)
            raise

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
    ) -> AsyncIterator[TokenChunk]:
        """The tokens and text of one request while they are made. Who stops reading (`aclose`)
        aborts it.

        Raises:
            CoordinatorLost, and whatever the request fails with, behind the last chunk.
        """
        request = await self.submit(prompt, sampling_params, priority, stream=True)
        try:
            async for chunk in request:
                yield chunk
        finally:
            self.abort(request)

    def abort(self, request: RemoteRequest) -> None:
        """End a request; one that has ended stays as it is."""
        if not request.is_over and self._connection is not None:
            self._connection.send(Abort(request.number))

    async def stats(self) -> dict[str, Any]:
        """The coordinator's counters, and its replicas by name; see docs/serving.md."""
        return await self._ask("stats")

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask something of the whole service, or tell it what to do.

        Args:
            what: "stats", or one of `service_verbs.VERBS`.
            fields: what else the verb takes.

        Raises:
            CoordinatorLost: there is none.
            ValueError: the service cannot do that.
        """
        return await self._ask(what, fields=fields)

    async def pause_replica(self, name: str) -> None:
        """Let a replica stand still, with its requests, until `resume_replica`.

        Raises:
            ValueError: there is none of that name.
        """
        await self._ask("pause", name)

    async def drain_replica(self, name: str) -> None:
        """Give a replica nothing more, until `resume_replica`; it finishes what it has."""
        await self._ask("drain", name)

    async def resume_replica(self, name: str) -> None:
        """Let a paused or drained replica go on."""
        await self._ask("resume", name)

    async def remove_replica(self, name: str) -> None:
        """Let a replica finish what it has, and end its process."""
        await self._ask("remove", name)

    async def close(self) -> None:
        """Disconnect; the coordinator aborts what is unfinished."""
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._connection is not None:
            self._connection.send(Goodbye())
        self._lose(CoordinatorLost("this client was closed"))

    async def _ask(
        self, what: str, replica: str = "", fields: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        connection = await self._open()
        number = next(self._numbers)
        self._questions[number] = asyncio.get_running_loop().create_future()
        connection.send(Ask(number, what, replica, fields or {}))
        return await self._questions[number]

    async def _open(self) -> Connection[ToClient]:
        async with self._opening:
            if self._connection is None:
                connection = Connection(self._address, decode_for_client, Pong)
                try:
                    await connection.open(ClientHello(PROTOCOL), self._timeout_s)
                except BaseException:
                    connection.close()
                    raise
                self._connection = connection
                self._reader = asyncio.create_task(self._read(connection))
            return self._connection

    async def _read(self, connection: Connection[ToClient]) -> None:
        try:
            while True:
                message = await connection.receive()
                match message:
                    case Chunk():
                        if (request := self._requests.get(message.number)) is not None:
                            request._hear(message)
                    case Ended():
                        if (request := self._requests.pop(message.number, None)) is not None:
                            request._hear(message)
                    case Answer():
                        self._answer(message)
        except Exception as error:  # whatever it is, nobody is to wait for ever
            text = str(error) if isinstance(error, CoordinatorLost) else repr(error)
            self._lose(
                CoordinatorLost(f"{text} What was unfinished is aborted: send it once more.")
            )

    def _answer(self, message: Answer) -> None:
        question = self._questions.pop(message.number, None)
        if question is None or question.done():
            return
        if message.failure is not None:
            question.set_exception(exception_of(*message.failure))
        else:
            question.set_result(message.value)

    def _lose(self, error: CoordinatorLost) -> None:
        connection, self._connection = self._connection, None
        self._first_replica.forget()
        for request in self._requests.values():
            request._lose(error)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(error)
        self._requests.clear()
        self._questions.clear()
        if connection is not None:
            connection.close()


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a prompt, and no list of prompts."""
    if isinstance(prompts, str):
        return True
    first = prompts[0] if len(prompts) else ""
    return not isinstance(first, str) and not hasattr(first, "__len__")


def _token_ids(prompt: Any) -> list[int]:
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not all(type(token) is int for token in tokens):
        raise RequestError(f"the prompt {prompt!r} is neither a text nor a list of token ids.")
    return tokens


def _encoded(params: SamplingParams) -> bytes:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params={params!r} must be SamplingParams.")
    try:
        data = encode(params)
        msgspec.msgpack.decode(data, type=SamplingParams)
    except UNSENDABLE as error:
        raise RequestError(f"sampling_params cannot be sent: {error}") from error
    return data
