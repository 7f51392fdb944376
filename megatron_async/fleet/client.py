"""`FleetClient`: sends requests to the replicas of a fleet, and again when a replica is lost.

For an HTTP process it is what `TokenClient` is in front of a coordinator. Who serves a request, the
fleet's manager decides; a manager drops the requests of a replica that dies. They are sent again
here, by the rules of the coordinator's dispatcher (`RoutedRequest.may_be_served_again`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import Context
from itertools import count
from typing import Any, Protocol

import msgspec

from megatron_async.errors import ReplicaLost
from megatron_async.fleet.messages import (
    MOST_INGRESSES,
    FleetRun,
    RouteHint,
    decode_batch,
    encode_run,
    first_number,
)
from megatron_async.fleet.request import FleetRequest, InOrder
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.limits import InFlight
from megatron_async.serving.messages import Ended, StepTokens
from megatron_async.serving.model_card import ModelCard, decode_card
from megatron_async.serving.readers import TokenReader
from megatron_async.serving.reasons import why_not_again
from megatron_async.serving.records import CoordinatorConfig, tokens_of
from megatron_async.serving.request_message import check_request, request_message
from megatron_async.serving.routing import prompt_hashes
from megatron_async.serving.sent_request import SentRequest
from megatron_async.serving.sent_requests import SentRequests
from megatron_async.serving.service_counters import ServiceCounters

logger = logging.getLogger("megatron_async")

LATE_S = 5.0
"""A call has ended, and what its request ended with is to come by another call: if not so soon,
that call's replica is lost."""


class Fleet(Protocol):
    """The manager of a fleet: finds a replica, and carries bytes."""

    def serve(self, data: bytes, hint: RouteHint) -> AsyncIterator[bytes]:
        """Let a replica serve a `FleetRun`.

        Returns:
            batches (`FleetBatch`, encoded).

        Raises:
            ReplicaLost: the replica has died, or there is none.
            Exception: the request alone has failed.
        """

    async def abort(self, replica: str, number: int) -> None:
        """Let a replica end a request; nothing if the replica is gone."""

    async def card(self) -> bytes:
        """A replica's model card, encoded. Waits for a replica."""

    def replicas(self) -> Mapping[str, Mapping[str, Any]]:
        """By name what replicas have told of themselves (`FleetReplica.status`)."""


class FleetClient:
    """Sends requests to a fleet and calls their readers; on one event loop.

    Args:
        fleet: carries them.
        config: limits of this client's requests, and how often a request is sent again.
        ingress: number of this client, below `MOST_INGRESSES`; None: drawn.

    Attributes:
        after_message: called when readers were given all that had come.
    """

    def __init__(
        self, fleet: Fleet, config: CoordinatorConfig | None = None, ingress: int | None = None
    ) -> None:
        self._fleet = fleet
        self._config = config or CoordinatorConfig()
        ingress = secrets.randbelow(MOST_INGRESSES) if ingress is None else ingress
        self._numbers = count(first_number(ingress))
        self._requests: dict[int, FleetRequest] = {}
        self._heard: dict[str, InOrder] = {}
        self._served_by: dict[str, SentRequests] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_suspect = asyncio.Lock()
        self._card: ModelCard | None = None
        self._in_flight = InFlight(self._config)
        self._counters: Counter[str] = Counter()
        self._service = ServiceCounters()
        self._has_served = False
        self.after_message: Callable[[], None] | None = None

    # ---- As `TokenClient` --------------------------------------------------------------------

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
        """Send one request; arguments, result and errors are those of `TokenClient.send`."""
        asked = request_message(prompt, params, priority, owner, label, traceparent)
        check_request(asked)
        asked.number = number = next(self._numbers)
        self._counters["received"] += 1
        top_n = params.top_n_logprobs if params.return_log_probs else 0
        sent = SentRequest(reader, top_n)
        if why := self._in_flight.why_too_many(owner, tokens_of(asked)):
            self._counters["refused"] += 1
            loop = asyncio.get_running_loop()
            loop.call_soon(self._tell, sent, Ended(number, "error", ("Overloaded", why)))
            return number
        request = FleetRequest.of(asked, sent, time.monotonic())
        self._requests[number] = request
        self._in_flight.add(request)
        self._start(self._serve(request))
        return number

    def abort(self, number: int) -> None:
        """End a request that `send` returned; one that has ended stays as it is."""
        request = self._requests.get(number)
        if request is None or request.is_aborted:
            return
        request.is_aborted = True
        if request.served_by:
            self._start(self._fleet.abort(request.served_by, number))

    async def card(self) -> ModelCard:
        """What is served; waits for the first replica."""
        if self._card is None:
            self._card = decode_card(await self._fleet.card())
        return self._card

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Answer "health" and "stats" for this ingress and all replicas; "abort" a request.

        Raises:
            ValueError: what else a coordinator's service does, a fleet's manager does.
        """
        replicas = self._fleet.replicas()
        self._has_served |= bool(replicas)
        none = "restarting" if self._has_served else "loading"
        state = "running" if replicas else none
        match what:
            case "health":
                return {"state": state, "replicas": len(replicas)}
            case "stats":
                return self._stats(state, replicas)
            case "abort":
                wanted = [
                    number
                    for number, request in self._requests.items()
                    if fields.get("all") or request.asked.label == fields.get("label")
                ]
                for number in wanted:
                    self.abort(number)
                return {"aborted": len(wanted)}
        raise ValueError(
            f"{what} is not served in front of Ray: scale or delete the application by Ray's own "
            "commands (docs/ray.md)."
        )

    async def close(self) -> None:
        """End all calls; what is unfinished is not told an end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stats(self, state: str, replicas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        names = ("received", "completed", "failed", "aborted", "retried", "refused")
        waiting = sum(not request.served_by for request in self._requests.values())
        return {
            **{f"{name}_requests": self._counters[name] for name in names},
            "unfinished_requests": len(self._requests),
            "unfinished_tokens": self._in_flight.tokens,
            "queued_requests": waiting,
            "clients": 1,
            "replicas": {name: {"engine": {}, **replica} for name, replica in replicas.items()},
            "state": state,
            "service": self._service.as_dict(),
        }

    # ---- One request -------------------------------------------------------------------------

    def _start(self, work: Any) -> None:
        # In a context of its own: Ray cancels calls with the HTTP request that made them, and a
        # call may carry what other requests wait for.
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: FleetRequest) -> None:
        """Let replicas serve a request until it has ended."""
        while not request.is_over:
            if request.is_aborted and not request.served_by:
                self._end(request, "RequestAborted", "aborted before a replica had it")
            elif request.is_suspect:
                async with self._one_suspect:  # or who is innocent would die with who is not
                    await self._try(request)
            else:
                await self._try(request)

    async def _try(self, request: FleetRequest) -> None:
        """Let one replica serve a request."""
        attempt, request.attempts = request.attempts, request.attempts + 1
        request.given_at = time.monotonic()
        calls = self._fleet.serve(
            encode_run(FleetRun(request.asked, attempt)), await self._hint(request)
        )
        try:
            async for data in calls:
                self._hear(data)
            await asyncio.wait_for(request.over.wait(), LATE_S)
        except (ReplicaLost, TimeoutError) as error:
            reason = str(error) or f"the end of the request did not come within {LATE_S:g} s"
            self._lost(request, reason)
        except Exception as error:
            self._end(request, type(error).__name__, str(error))

    async def _hint(self, request: FleetRequest) -> RouteHint:
        block_size = (await self.card()).block_size_tokens
        return RouteHint(
            request.number,
            tuple(prompt_hashes(request.asked.prompt, block_size)),
            request.tokens,
            -(-request.tokens // block_size),
        )

    def _lost(self, request: FleetRequest, reason: str) -> None:
        """The replica of a request is lost; what it still has on its way is not told."""
        if request.is_over:
            return
        name = request.served_by
        if name:
            self._served_by[name].take(request.number)
            request.served_by = ""
        shown = name or "(its name is not known)"
        if request.is_aborted:
            self._end(request, "RequestAborted", "aborted by its client")
        elif request.may_be_served_again(self._config):
            logger.warning("Replica %s is lost (%s): a request is sent again.", shown, reason)
            self._counters["retried"] += 1
            request.sent.again()
        else:
            why = why_not_again(request, shown, reason, self._config)
            self._end(request, ReplicaLost.__name__, why)

    def _end(self, request: FleetRequest, kind: str, text: str) -> None:
        """End a request of which no replica says more."""
        reason = "aborted" if kind == "RequestAborted" else "error"
        ended = Ended(request.number, reason, (kind, text))
        self._tell(request.sent, msgspec.structs.replace(ended, attempts=request.attempts))
        self._finish(request, ended)

    def _tell(self, sent: SentRequest, ended: Ended) -> None:
        alone = SentRequests(self.abort)
        alone.put(ended.number, sent)
        alone.hear(StepTokens(ends=[ended]))
        self._flush()

    def _finish(self, request: FleetRequest, ended: Ended) -> None:
        """Book the end of a request."""
        del self._requests[request.number]
        if request.served_by:
            self._served_by[request.served_by].take(request.number)
        self._in_flight.remove(request)
        kind = None if ended.failure is None else ended.failure[0]
        outcome = "completed" if kind is None else "failed"
        self._counters["aborted" if kind == "RequestAborted" else outcome] += 1
        self._service.ended_as(ended, request.wait_s)
        request.over.set()

    # ---- What comes in -----------------------------------------------------------------------

    def _hear(self, data: bytes) -> None:
        batch = decode_batch(data)
        order = self._heard.setdefault(batch.replica, InOrder())
        for each in order.take(batch.sequence, batch):
            for number, attempt in each.begun:
                self._begun(each.replica, number, attempt)
            for step in each.steps:
                self._hear_step(each.replica, step)
        self._flush()

    def _begun(self, replica: str, number: int, attempt: int) -> None:
        request = self._requests.get(number)
        if request is None or attempt != request.attempts - 1:
            return  # of an attempt that is lost
        request.served_by = replica
        served = self._served_by.setdefault(replica, SentRequests(self.abort))
        served.put(number, request.sent)
        if request.is_aborted:
            self._start(self._fleet.abort(replica, number))

    def _hear_step(self, replica: str, step: StepTokens) -> None:
        requests = {ended.number: self._requests.get(ended.number) for ended in step.ends}
        ends = []
        for ended in step.ends:
            request = requests[ended.number]
            if request is not None and request.served_by == replica:
                ends.append(msgspec.structs.replace(ended, attempts=request.attempts))
        step.ends = ends
        self._service.generated(len(step.tokens) // 4)
        if replica in self._served_by:
            self._served_by[replica].hear(step)
        for ended in ends:
            request = requests[ended.number]
            if request is not None:
                self._finish(request, ended)

    def _flush(self) -> None:
        if self.after_message is not None:
            self.after_message()
