"""`TokenClient`: a client of a coordinator that gives tokens to readers as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, Protocol, override

import msgspec

from megatron_async.errors import CoordinatorLost, ReplicaLost, RequestError
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.requests.traces import read_traceparent
from megatron_async.serving.connection import Connection, check_sendable
from megatron_async.serving.messages import (
    PROTOCOL,
    UNSENDABLE,
    Abort,
    Again,
    Answer,
    Ask,
    ClientHello,
    Generate,
    Goodbye,
    NewModel,
    Pong,
    StepTokens,
    ToClient,
    decode_for_client,
    encode,
    exception_of,
)
from megatron_async.serving.model_card import ModelCard, decode_card
from megatron_async.serving.readers import TokenReader
from megatron_async.serving.sent_requests import SentRequests

logger = logging.getLogger("megatron_async")

MOST_LABEL = 128
"""Most characters of a label or an owner."""
RETRY_EVERY_S = 0.2
"""Seconds between two attempts of a client that keeps its connection to reach a lost
coordinator."""
CARD_EVERY_S = 0.1
"""Seconds between two requests to a coordinator that has no model card yet."""
ASK_EVERY_S = 0.2
"""Seconds between two questions to a coordinator that has no replica yet."""
LEAVING = ("leaving", "helping")
"""States of replicas that serve no further request (`records.ReplicaState`, which clients do not
import)."""


def request_message(
    prompt: Sequence[int] | str,
    params: SamplingParams,
    priority: int = 0,
    owner: str = "",
    label: str = "",
    traceparent: str = "",
) -> Generate:
    """The message of a request, without a number; the arguments are those of `TokenClient.send`.

    Whether the prompt can be sent is found out when it is (`check_request` asks before). A replica
    refuses parameters of other types than they should be of, as it refuses those out of range.

    Raises:
        RequestError: a value of the request cannot be sent.
    """
    if type(priority) is not int:
        raise RequestError(f"priority={priority!r} is not allowed: it must be an integer.")
    if len(label) > MOST_LABEL or len(owner) > MOST_LABEL:
        raise RequestError(
            f"a label of {len(label)} and an owner of {len(owner)} characters were given: at "
            f"most {MOST_LABEL} are allowed."
        )
    return Generate(
        0, prompt if isinstance(prompt, str) else list(prompt), msgspec.Raw(_encoded(params)),
        params.num_tokens_to_generate, priority, label, owner, checked_traceparent(traceparent),
    )  # fmt: skip


def check_request(message: Generate) -> None:
    """Check what `request_message` leaves to others: for callers that report it before they send.

    Raises:
        RequestError: the message cannot be sent, or its parameters cannot be read.
    """
    try:
        msgspec.msgpack.decode(message.params, type=SamplingParams)
    except UNSENDABLE as error:
        raise RequestError(f"sampling_params cannot be sent: {error}") from error
    try:
        check_sendable(message)
    except UNSENDABLE as error:
        raise unsendable_prompt(error) from error


def unsendable_prompt(error: Exception) -> RequestError:
    """What a caller is told whose prompt cannot be encoded."""
    return RequestError(f"the prompt cannot be sent: {error}")


def checked_traceparent(given: str) -> str:
    """A caller's `traceparent`, as it is sent.

    Raises:
        RequestError: it is none.
    """
    if not given:
        return ""
    found = read_traceparent(given) if isinstance(given, str) else ""
    if not found:
        raise RequestError(
            f"traceparent={given!r} is not allowed: give W3C's header, as in "
            '"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", or leave it out.'
        )
    return found


def _encoded(params: SamplingParams) -> bytes:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params={params!r} must be SamplingParams.")
    try:
        return encode(params)
    except UNSENDABLE as error:
        raise RequestError(f"sampling_params cannot be sent: {error}") from error


class FirstReplica:
    """Waits for a coordinator's first replica, which may still load its model.

    Once there has been a replica, the coordinator itself keeps requests without a replica, for up
    to its `no_replica_timeout_s`."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._asking = asyncio.Lock()
        self.forget()

    def forget(self) -> None:
        """The coordinator is lost; the next one at its address may have no replica yet."""
        self._has_come = self._has_told = False

    async def wait(self, stats: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """Wait until there is a replica; return at once if there was one before.

        Raises:
            ReplicaLost: none came in time.
        """
        start = time.monotonic()
        async with self._asking:  # one asks for all waiters
            while not self._has_come:
                replicas = (await stats())["replicas"].values()
                self._has_come = any(replica["state"] not in LEAVING for replica in replicas)
                if self._has_come:
                    break
                if time.monotonic() - start >= self._timeout_s:
                    raise ReplicaLost(
                        f"the coordinator at {self._address} has no replica, and none came within "
                        f"{self._timeout_s:g} s: start one with `megatron-async replica MODEL "
                        f"--coordinator {self._address}`, or raise replica_timeout_s if one is "
                        "loading its model."
                    )
                self._tell()
                await asyncio.sleep(min(ASK_EVERY_S, self._timeout_s))

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "The coordinator at %s has no replica yet: waiting up to %g s for one to load its "
                "model (`megatron-async replica MODEL` starts one).",
                self._address, self._timeout_s,
            )  # fmt: skip


class RequestClient(Protocol):
    """A client as an HTTP process sees it.

    Attributes:
        after_message: called when readers were given all that had come: a writer for several
            of them writes once.
    """

    after_message: Callable[[], None] | None

    def send(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams,
        reader: TokenReader,
        priority: int = 0,
        owner: str = "",
        label: str = "",
        traceparent: str = "",
    ) -> int:
        """Send one request over the connection that is there; on the client's event loop.

        Args:
            prompt: text or token ids.
            params: as for `generate`.
            reader: gets tokens, texts and the end; see `TokenReader`.
            priority: requests of higher priority go first.
            owner: the owner whose limits count the request; "": none.
            label: name by which an administrator can abort it; at most 128 characters.
            traceparent: W3C's, of the trace that it belongs to: logs of coordinator and replicas
                name it; "": none.

        Returns:
            its number, for `abort`.

        Raises:
            CoordinatorLost: there is no connection now.
            RequestError: a value of the request cannot be sent.
        """
        self._check_open()
        message = request_message(prompt, params, priority, owner, label, traceparent)
        return self._send(message, params, reader)

    def abort(self, number: int) -> None:
        """End a request that `send` returned; one that has ended stays as it is."""

    async def card(self) -> ModelCard:
        """The card of the served model; waits for the first replica."""

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask something of the service, or tell it what to do; ValueError: it cannot do that."""

    def _check_open(self) -> None:
        """Raise CoordinatorLost if there is no connection now."""
        return

    def _send(self, message: Generate, params: SamplingParams, reader: TokenReader) -> int:
        """Send a message, which has no number yet."""


class TokenClient(RequestClient):
    """Sends requests to a coordinator and calls their readers; on one event loop.

    Args:
        address: of the coordinator, as in "tcp://127.0.0.1:9500".
        connect_timeout_s: how long a call waits for a coordinator.
        replica_timeout_s: how long requests wait for the coordinator's first replica, which may
            still load its model. (Later ones wait in the coordinator; see docs/serving.md.)
        secret: the coordinator's, if it asks for one.

    Attributes:
        lost: called when the coordinator is lost; all readers have been told before.
    """

    def __init__(
        self,
        address: str,
        connect_timeout_s: float = 10.0,
        replica_timeout_s: float = 600.0,
        secret: bytes | None = None,
    ) -> None:
        self._address = address
        self._secret = secret
        self._timeout_s = connect_timeout_s
        self._replica_timeout_s = replica_timeout_s
        self._first_replica = FirstReplica(address, replica_timeout_s)
        self._connection: Connection[ToClient] | None = None
        self._opening = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None
        self._numbers = count()
        self._sent = SentRequests(self.abort)
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._card: ModelCard | None = None
        self._card_is_new = False
        self._tokenizer: tuple[str, Any] | None = None
        self.after_message: Callable[[], None] | None = None
        self.lost: Callable[[CoordinatorLost], None] | None = None

    @override
    def abort(self, request: TokenReader | int) -> None:
        """End a request that `submit` or `send` returned; if it has ended, nothing happens."""
        number = request if isinstance(request, int) else request.number
        if number in self._sent and self._connection is not None:
            self._connection.send(Abort(number))

    async def card(self) -> ModelCard:
        """The card of the served model; waits for the first replica, which has the card.

        Raises:
            CoordinatorLost: there is none.
            ReplicaLost: no replica came within `replica_timeout_s`.
        """
        deadline = asyncio.get_running_loop().time() + self._replica_timeout_s
        while self._card is None or not self._card_is_new:
            known = None if self._card is None else self._card.digest
            answer = await self._ask("card", fields={"digest": known})
            if "card" in answer:
                self._card = decode_card(answer["card"])
            self._card_is_new = bool(answer)
            if self._card_is_new and self._card is not None:
                return self._card
            await self._first_replica.wait(self.stats)
            if asyncio.get_running_loop().time() >= deadline:
                raise ReplicaLost(
                    f"no replica told the coordinator at {self._address} what it serves within "
                    f"{self._replica_timeout_s:g} s."
                )
            await asyncio.sleep(CARD_EVERY_S)
        return self._card

    async def stats(self) -> dict[str, Any]:
        """The coordinator's counters, and its replicas by name; see docs/serving.md."""
        return await self._ask("stats")

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask for data of the whole service, or send it a command. `what` is "stats", or one of
        `service_verbs.VERBS`.

        Raises:
            CoordinatorLost: there is none.
            ValueError: the service cannot do that.
        """
        return await self._ask(what, fields=fields)

    async def close(self) -> None:
        """Disconnect; the coordinator aborts unfinished requests."""
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
            self._keeping = None
        if self._connection is not None:
            self._connection.send(Goodbye())
        self._lose(CoordinatorLost("this client was closed"))

    # ---- The connection ----------------------------------------------------------------------

    @override
    def _check_open(self) -> None:
        if self._connection is None:
            raise CoordinatorLost(f"there is no connection to the coordinator at {self._address}.")

    @override
    def _send(self, message: Generate, params: SamplingParams, reader: TokenReader) -> int:
        assert self._connection is not None
        message.number = next(self._numbers)
        try:
            self._connection.send(message)
        except UNSENDABLE as error:
            raise unsendable_prompt(error) from error
        self._sent.put(message.number, reader, params)
        return message.number

    async def _ask(
        self, what: str, replica: str = "", fields: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        connection = await self._open()
        number = next(self._numbers)
        try:
            connection.send(Ask(number, what, replica, fields or {}))
        except UNSENDABLE as error:
            raise ValueError(f"{what} cannot be sent: {error}.") from error
        self._questions[number] = asyncio.get_running_loop().create_future()
        return await self._questions[number]

    async def _open(self) -> Connection[ToClient]:
        async with self._opening:
            if self._connection is None:
                connection = Connection(self._address, decode_for_client, Pong, self._secret)
                try:
                    await connection.open(ClientHello(PROTOCOL), self._timeout_s)
                except BaseException:
                    connection.close()
                    raise
                self._connection = connection
                connection.listen(self._hear, self._flush, self._lose_connection)
            if self._connection is None:
                raise CoordinatorLost(f"the coordinator at {self._address} is gone again.")
            return self._connection

    async def open(self) -> None:
        """Connect, and from now on connect again whenever the coordinator is lost, until `close`.

        Raises:
            CoordinatorLost: nobody answers within `connect_timeout_s`.
        """
        await self._open()
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep_open())

    @property
    def is_open(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    async def _keep_open(self) -> None:
        while True:
            if self._connection is None:
                try:
                    await self._open()
                except CoordinatorLost:
                    pass
                except Exception as error:
                    logger.warning("No connection to the coordinator: %s", error)
            await asyncio.sleep(RETRY_EVERY_S)

    # ---- What comes in -----------------------------------------------------------------------

    def _hear(self, message: ToClient) -> None:
        match message:
            case StepTokens():
                self._sent.hear(message)
            case Again():
                self._sent.again(message.number)
            case NewModel():
                self._card_is_new = False
            case Answer():
                self._answer(message)

    def _flush(self) -> None:
        if self.after_message is not None:
            self.after_message()

    def _lose_connection(self, error: CoordinatorLost) -> None:
        self._lose(CoordinatorLost(f"{error} What was unfinished is aborted: send it once more."))

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
        self._card_is_new = False
        questions, self._questions = self._questions, {}
        self._sent.fail_all(CoordinatorLost.__name__, str(error))
        self._flush()
        for question in questions.values():
            if not question.done():
                question.set_exception(error)
        if connection is not None:
            connection.close()
            if self.lost is not None:
                self.lost(error)
