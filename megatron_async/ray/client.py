"""`FleetClient`: sends requests to the replicas of a fleet, as a coordinator would.

For an HTTP process it is what `TokenClient` is in front of a coordinator, and it is the coordinator
too: a `Dispatcher` chooses a request's replica, and what happens to requests of a lost replica.
The fleet's manager says which replicas there are, and carries a call for each request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol, override

import msgspec

from megatron_async.errors import ReplicaLost
from megatron_async.ray.messages import (
    MOST_INGRESSES,
    InOrder,
    decode_batch,
    decode_done,
    decode_hello,
    first_number,
)
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.dispatcher import Dispatcher
from megatron_async.serving.messages import (
    PROTOCOL,
    Abort,
    Again,
    Answer,
    Ask,
    ClientHello,
    Do,
    Done,
    Ended,
    Generate,
    Goodbye,
    Leave,
    Leaving,
    Pong,
    Refused,
    ReplicaStatus,
    Run,
    StepTokens,
    ToClient,
    ToCoordinator,
    ToReplica,
    Weights,
    encode,
    exception_of,
)
from megatron_async.serving.model_card import ModelCard, decode_card
from megatron_async.serving.readers import TokenReader
from megatron_async.serving.records import MOST_SILENCE_S, CoordinatorConfig
from megatron_async.serving.sent_requests import SentRequests
from megatron_async.serving.service_verbs import WEIGHT_VERBS
from megatron_async.serving.token_client import RequestClient, check_request

logger = logging.getLogger("megatron_async")

LATE_S = 5.0
"""A call has ended, and what its request ended with is to come by another call: if not so soon,
that call's replica is lost."""
LOOK_EVERY_S = 0.5
"""Seconds between two looks at the replicas that there are; a request looks too."""
ME = b""
"""The dispatcher's one client."""
SERVED = ("health", "stats", "abort", *WEIGHT_VERBS)
"""What the dispatcher is asked; the rest is the manager's."""


class Fleet(Protocol):
    """The manager of a fleet: says which replicas there are, and carries bytes."""

    def serve(self, data: bytes, replica: str) -> AsyncIterator[bytes]:
        """Let a replica serve a `Run`, encoded; its name is never another's. Yields batches
        (`FleetBatch`, encoded).

        Raises:
            ReplicaLost: the replica has died; any other error: the request alone has failed.
        """

    async def abort(self, replica: str, number: int) -> None:
        """Let a replica end a request; nothing if the replica is gone."""

    async def update(self, replica: str, data: bytes) -> bytes:
        """Let a replica do a `Do` of an update of the weights, encoded; returns its `Done`."""

    async def hello(self, replica: str) -> bytes:
        """What a replica says of itself, `ReplicaHello`, encoded."""

    async def card(self) -> bytes:
        """A replica's model card, encoded. Waits for a replica."""

    def replicas(self) -> Mapping[str, Mapping[str, Any]]:
        """By name what replicas have told of themselves (`FleetReplica.status`)."""


@dataclass(eq=False)
class _Call:
    """A request at its replica."""

    task: asyncio.Task[None] | None = None
    has_begun: bool = False
    is_aborted: bool = False
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Replica:
    """A replica that has joined, with its unfinished calls by number."""

    name: str
    calls: dict[int, _Call] = field(default_factory=dict)
    order: InOrder = field(default_factory=InOrder)
    status: Mapping[str, Any] = field(default_factory=dict)
    given: int = 0
    """Calls."""
    counted: int = 0
    """Calls given when this status came."""
    is_leaving: bool = False

    @property
    def identity(self) -> bytes:
        """The dispatcher's name for it."""
        return self.name.encode()


class FleetClient(RequestClient):
    """Sends requests to a fleet and calls their readers; on one event loop.

    A replica that was lost is not used again, as batches of its news may be missing.

    Args:
        config: limits of this client's requests, and how often a request is sent again. The manager
            itself notices silent replicas, and queues what a replica has no room for.
        ingress: number of this client, below `MOST_INGRESSES`; None: drawn.
    """

    def __init__(
        self, fleet: Fleet, config: CoordinatorConfig | None = None, ingress: int | None = None
    ) -> None:
        self._fleet = fleet
        ingress = secrets.randbelow(MOST_INGRESSES) if ingress is None else ingress
        ours = replace(
            config or CoordinatorConfig(),
            silence_s=MOST_SILENCE_S,
            client_silence_s=MOST_SILENCE_S,
            stall_s=MOST_SILENCE_S,
            requests_per_slot=float(2**31),
        )
        self._told: deque[ToClient] = deque()
        self._dispatcher = Dispatcher(ours, self._carry, time.monotonic(), first_number(ingress))
        self._dispatcher.hear(ME, ClientHello(PROTOCOL), time.monotonic())
        self._numbers = count()
        self._questions: dict[int, asyncio.Future[Answer]] = {}
        self._sent = SentRequests(self.abort)
        self._replicas: dict[str, _Replica] = {}
        self._known: set[str] = set()
        """Names of those that have joined, are about to, or were lost."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._card: ModelCard | None = None
        self.after_message: Callable[[], None] | None = None

    # ---- As `RequestClient` ------------------------------------------------------------------

    @override
    def _send(self, asked: Generate, params: SamplingParams, reader: TokenReader) -> int:
        check_request(asked)
        asked.number = next(self._numbers)
        self._sent.put(asked.number, reader, params)
        self._look()
        self._dispatcher.hear(ME, asked, time.monotonic())
        if self._told:  # a refusal, which comes after the number
            asyncio.get_running_loop().call_soon(self._deliver)
        return asked.number

    @override
    def abort(self, number: int) -> None:
        if number in self._sent:
            self._hear(ME, Abort(number))

    @override
    async def card(self) -> ModelCard:
        self._look()
        if self._card is None:
            self._card = decode_card(await self._fleet.card())
        return self._card

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Answer "health" and "stats" for this ingress and all replicas; "abort" a request; update
        the weights. An update belongs to this ingress: others learn of it when it is done."""
        if what not in SERVED:
            raise ValueError(
                f"{what} is not served in front of Ray: scale or delete the application by Ray's "
                "own commands (docs/serving.md)."
            )
        self._look()
        number = next(self._numbers)
        answered = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._hear(ME, Ask(number, what, "", fields))
            answer = await answered
        finally:
            del self._questions[number]
        if answer.failure is not None:
            raise exception_of(*answer.failure)
        if what == "stats":
            seen = self._fleet.replicas()
            answer.value["replicas"] = {name: {"engine": {}, **seen[name]} for name in seen}
        return answer.value

    async def close(self) -> None:
        """End all calls; what is unfinished is not told an end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- The dispatcher ----------------------------------------------------------------------

    def _hear(self, identity: bytes, message: ToCoordinator) -> None:
        """Let the dispatcher hear a message, and tell readers what follows of it."""
        self._dispatcher.hear(identity, message, time.monotonic())
        self._deliver()

    def _deliver(self) -> None:
        while self._told:
            message = self._told.popleft()
            if isinstance(message, StepTokens):
                self._sent.hear(message)
            elif isinstance(message, Again):
                self._sent.again(message.number)
            elif isinstance(message, Answer) and message.number in self._questions:
                self._questions[message.number].set_result(message)
        if self.after_message is not None:
            self.after_message()

    def _carry(self, identity: bytes, message: ToClient | ToReplica) -> None:
        """Do what the dispatcher sends."""
        if identity == ME:
            self._told.append(message)  # type: ignore[arg-type]
            return
        replica = self._replicas.get(identity.decode())
        if replica is None:
            return
        match message:
            case Run():
                call = replica.calls[message.number] = _Call()
                replica.given += 1
                call.task = self._start(self._serve(replica, call, message))
            case Abort(number) if (found := replica.calls.get(number)) is not None:
                found.is_aborted = True
                if found.has_begun:  # else it would come before what it is to end
                    self._start(self._fleet.abort(replica.name, number))
            case Do():
                self._start(self._update(replica, message))
            case Leave() | Refused():
                loop = asyncio.get_running_loop()
                loop.call_soon(self._drop, replica, getattr(message, "reason", ""))

    def _start(self, work: Any) -> asyncio.Task[None]:
        # In a context of its own: Ray cancels calls with the HTTP request that made them, and a
        # call may carry what other requests wait for.
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- Replicas ----------------------------------------------------------------------------

    def _look(self) -> None:
        """Take in which replicas there are, and what they have told."""
        if self._looking is None:
            self._looking = self._start(self._keep_looking())
        seen = self._fleet.replicas()
        for name in seen:
            if name not in self._known:
                self._known.add(name)
                self._start(self._join(name))
        for name, replica in list(self._replicas.items()):
            if name not in seen:
                if not replica.is_leaving:
                    self._start(self._leave(replica))
            elif (status := seen[name]) and status != replica.status:
                # It was told before: of the calls since the last one it may not know all.
                told = ReplicaStatus(
                    replica.counted, int(status["unfinished_tokens"]), int(status["free_blocks"]),
                    0, False, {},
                )  # fmt: skip
                replica.status, replica.counted = dict(status), replica.given
                weights = msgspec.convert(status.get("weights", {}), Weights)
                self._dispatcher.verbs.weights.told(replica.identity, weights)
                self._hear(replica.identity, told)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._look()
            self._dispatcher.tick(time.monotonic())
            self._hear(ME, Pong())

    async def _join(self, name: str) -> None:
        try:
            hello = decode_hello(await self._fleet.hello(name))
        except Exception as error:
            logger.warning("Replica %s does not say what it is: %s", name, error)
            self._known.discard(name)
            return
        replica = self._replicas[name] = _Replica(name)
        self._hear(replica.identity, hello)

    async def _leave(self, replica: _Replica) -> None:
        """Give it no further calls; it finishes those that it has begun."""
        replica.is_leaving = True
        self._hear(replica.identity, Leaving())
        await asyncio.sleep(LATE_S)  # one that has died makes its calls raise: the rules of deaths
        for number, call in list(replica.calls.items()):
            if not call.has_begun:
                _cancel(replica.calls.pop(number))
                self._dispatcher.give_back(replica.identity, number, time.monotonic())
        self._deliver()

    def _drop(self, replica: _Replica, reason: str) -> None:
        """Forget it, for no reason if it left in order; what it has on its way is not told."""
        if self._replicas.get(replica.name) is not replica:
            return
        for call in replica.calls.values():
            _cancel(call)
        replica.calls.clear()
        del self._replicas[replica.name]
        self._hear(replica.identity, Goodbye(reason))

    # ---- Calls -------------------------------------------------------------------------------

    async def _serve(self, replica: _Replica, call: _Call, run: Run) -> None:
        """Let a replica serve one request to its end."""
        try:
            async for data in self._fleet.serve(encode(run), replica.name):
                self._hear_batch(replica, data)
            await asyncio.wait_for(call.is_over.wait(), LATE_S)
        except (ReplicaLost, TimeoutError) as error:
            late = f"the end of a request did not come within {LATE_S:g} s"
            self._drop(replica, str(error) or late)
        except Exception as error:
            ended = Ended(run.number, "error", (type(error).__name__, str(error)))
            replica.calls.pop(run.number, None)
            self._hear(replica.identity, StepTokens(ends=[ended]))

    async def _update(self, replica: _Replica, do: Do) -> None:
        try:
            done = decode_done(await self._fleet.update(replica.name, encode(do)))
        except Exception as error:
            done = Done(do.number, failure=(type(error).__name__, str(error)))
        self._hear(replica.identity, done)

    def _hear_batch(self, replica: _Replica, data: bytes) -> None:
        batch = decode_batch(data)
        for each in replica.order.take(batch.sequence, batch):
            for number in each.begun:
                if (call := replica.calls.get(number)) is not None:
                    call.has_begun = True
                    if call.is_aborted:
                        self._start(self._fleet.abort(replica.name, number))
            for step in each.steps:
                for ended in step.ends:
                    if (call := replica.calls.pop(ended.number, None)) is not None:
                        call.is_over.set()
                self._dispatcher.hear(replica.identity, step, time.monotonic())
        self._deliver()


def _cancel(call: _Call) -> None:
    if call.task is not None and call.task is not asyncio.current_task():
        call.task.cancel()
