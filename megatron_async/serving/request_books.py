"""`RequestBooks`: a coordinator's replicas, clients and unfinished requests, and how one ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import msgspec

from megatron_async.requests.traces import named
from megatron_async.serving.messages import (
    Abort,
    Ended,
    Leave,
    SetPaused,
    StepTokens,
    ToClient,
    ToReplica,
)
from megatron_async.serving.records import (
    ClientRecord,
    CoordinatorConfig,
    ReplicaRecord,
    ReplicaState,
    RoutedRequest,
)
from megatron_async.serving.request_queue import InFlight, RequestQueue
from megatron_async.serving.service_counters import ServiceCounters
from megatron_async.serving.step_arrays import StepArrays, by_row
from megatron_async.serving.token_routes import TokenRoutes

logger = logging.getLogger("megatron_async")


class RequestBooks:
    """The records on which a `Dispatcher` bases its decisions. `send` never fails; `first` is the
    number of the first request.

    Attributes:
        requests: unfinished requests, by the coordinator's numbers.
        queue: unfinished requests that no replica has.
        counters: requests "received", "completed", "failed", "aborted", "retried", "moved",
            "refused"; and "prefix_blocks", blocks of prompts that their replicas had served before.
        routes: the clients to which tokens are sent.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        send: Callable[[bytes, ToClient | ToReplica], None],
        first: int,
    ) -> None:
        self._config = config
        self.tell = self._send = send
        self.queue = RequestQueue()
        self.replicas: dict[bytes, ReplicaRecord] = {}
        self.clients: dict[bytes, ClientRecord] = {}
        self.requests: dict[int, RoutedRequest] = {}
        self.counters: Counter[str] = Counter()
        self.routes = TokenRoutes(first)
        self.in_flight = InFlight(config)
        self.service = ServiceCounters()

    def _parts_of(self, replica: ReplicaRecord, message: StepTokens) -> dict[int, StepTokens]:
        """A replica's step, divided into a message for each client, by the client's index: Python
        per client and per text, not per token.

        Raises:
            ValueError: the message's arrays do not fit together.
        """
        message = by_row(message)
        whole = self.routes.whole(replica.index, message)
        if whole is not None:
            parts = dict([whole])
        else:
            parts = dict(self.routes.split(replica.index, StepArrays.of(message)))
        for number, text in message.texts:
            if (request := replica.requests.get(number)) is not None:
                self._part_of(parts, request).texts.append((request.asked.number, text))
        return parts

    def _part_of(self, parts: dict[int, StepTokens], request: RoutedRequest) -> StepTokens:
        return parts.setdefault(self.clients[request.client].index, StepTokens())

    def abort_request(self, request: RoutedRequest) -> None:
        """End a request on behalf of its client or of an administrator."""
        request.is_aborted = True
        if request.replica is None:
            self._end_here(request, "RequestAborted", "aborted before a replica had it")
        else:
            self._abort_at_replica(request)

    def _abort_at_replica(self, request: RoutedRequest) -> None:
        if request.replica is not None:
            self._send(request.replica.identity, Abort(request.number))

    def _end_here(self, request: RoutedRequest, kind: str, text: str) -> None:
        """End a request of which no replica says more."""
        reason = "aborted" if kind == "RequestAborted" else "error"
        if trace := request.asked.traceparent:
            level = logging.INFO if reason == "aborted" else logging.WARNING
            logger.log(level, "%s ended (%s): %s", named(request.number, trace), kind, text)
        ended = Ended(request.number, reason, (kind, text))
        self._finish(request, ended)
        if request.client in self.clients:
            self._send(request.client, StepTokens(ends=[as_told(request, ended)]))

    def _finish(self, request: RoutedRequest, ended: Ended) -> None:
        """Book the end of a request."""
        kind = None if ended.failure is None else ended.failure[0]
        outcome = "completed" if kind is None else "failed"
        self.counters["aborted" if kind == "RequestAborted" else outcome] += 1
        self._forget(request)
        if (client := self.clients.get(request.client)) is not None:
            client.requests.pop(request.asked.number, None)
        self.service.ended(ended, request.wait_s)

    def _forget(self, request: RoutedRequest) -> None:
        del self.requests[request.number]
        self.routes.remove(request.number)
        self.in_flight.count(request, -1)
        self.queue.discard(request)
        if request.replica is not None:
            request.replica.requests.pop(request.number, None)
            self._let_go(request.replica)

    def set_state(self, replica: ReplicaRecord, state: ReplicaState) -> None:
        """A replica changes its state, and is told."""
        replica.state = state
        # A replica that leaves or drains has requests to finish, even if it was paused before.
        self._send(replica.identity, SetPaused(state == ReplicaState.PAUSED))
        self._let_go(replica)

    def _let_go(self, replica: ReplicaRecord) -> None:
        """A replica that is to leave may, once it has nothing left."""
        if replica.state == ReplicaState.LEAVING and not replica.requests:
            self._send(replica.identity, Leave())


def as_told(request: RoutedRequest, ended: Ended) -> Ended:
    """An end as the request's client is told it."""
    return msgspec.structs.replace(ended, number=request.asked.number, attempts=request.attempts)
