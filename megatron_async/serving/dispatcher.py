"""`Dispatcher`: a coordinator's decisions. It knows no sockets: messages come in by `hear`, go out
by a function, and time is told to it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from itertools import count

import msgspec

from megatron_async.serving.commands import find_replica, state_after
from megatron_async.serving.messages import (
    PROTOCOL,
    Abort,
    Answer,
    Ask,
    Batch,
    Chunk,
    ClientHello,
    Completion,
    Done,
    Ended,
    Generate,
    Goodbye,
    Helping,
    Leave,
    Leaving,
    Ping,
    Pong,
    Refused,
    ReplicaHello,
    ReplicaInfo,
    ReplicaStatus,
    SetPaused,
    Started,
    ToClient,
    ToCoordinator,
    ToReplica,
    Welcome,
)
from megatron_async.serving.records import (
    ClientRecord,
    CoordinatorConfig,
    ReplicaRecord,
    ReplicaState,
    RoutedRequest,
    service_stats,
    why_nobody_serves,
    why_not_again,
    why_refused,
)
from megatron_async.serving.request_queue import RequestQueue
from megatron_async.serving.service_counters import ServiceCounters
from megatron_async.serving.service_verbs import VERBS, ServiceVerbs

logger = logging.getLogger("megatron_async")


class Dispatcher:
    """Who serves what, and what becomes of requests when somebody is lost.

    Args:
        config: limits and policies.
        send: sends a message to an identity; it never fails, who cannot be reached is reported by
            `lost`.
        now: seconds.

    Attributes:
        replicas: by identity.
        clients: by identity.
        requests: unfinished ones, by the coordinator's numbers.
        queue: those of them that no replica has.
        counters: requests "received", "completed", "failed", "aborted", "retried", "refused", and
            "prefix_blocks", those that their replicas had served before.
        verbs: what the whole service was told, and its state.
        service: counters for metrics.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        send: Callable[[bytes, ToClient | ToReplica], None],
        now: float,
    ) -> None:
        self._config = config
        self.tell = self._send = send
        self._numbers = count()
        self._last_ping = now
        self._replica_there = now
        self._departed = ""
        self.queue = RequestQueue()
        self.replicas: dict[bytes, ReplicaRecord] = {}
        self.clients: dict[bytes, ClientRecord] = {}
        self.requests: dict[int, RoutedRequest] = {}
        self.counters: Counter[str] = Counter()
        self.verbs = ServiceVerbs(self)
        self.service = ServiceCounters()

    # ---- What comes in -----------------------------------------------------------------------

    def hear(self, identity: bytes, message: ToCoordinator, now: float) -> None:
        """Take a message in."""
        if isinstance(message, ClientHello | ReplicaHello):
            self._welcome(identity, message, now)
        elif (replica := self.replicas.get(identity)) is not None:
            replica.last_heard = now
            self._hear_replica(replica, message, now)
        elif (client := self.clients.get(identity)) is not None:
            client.last_heard = now
            self._hear_client(client, message, now)
        else:
            self._send(identity, Refused("the coordinator does not know you: connect again."))
        self._dispatch(now)

    def lost(self, identity: bytes, reason: str, now: float) -> None:
        """Somebody is gone."""
        self.verbs.lost(identity)
        if (client := self.clients.pop(identity, None)) is not None:
            if client.requests:
                logger.warning("A client is gone: %s; its requests are aborted.", reason)
            for request in list(client.requests.values()):
                self._abort_at_replica(request)
                self._forget(request)
                self.counters["aborted"] += 1
        elif (replica := self.replicas.get(identity)) is not None:
            self._lose(replica, reason, now, in_order=False)
        self._dispatch(now)

    def tick(self, now: float) -> None:
        """Ping everybody when it is time, and see who is silent."""
        config = self._config
        if now - self._last_ping >= config.ping_interval_s:
            self._last_ping = now
            self.ping()
            self._check_alive(now)
        if any(not replica.state.is_departing for replica in self.replicas.values()):
            self._replica_there = now
        elif self.verbs.holds_queue:
            pass
        elif self.queue and now - self._replica_there >= config.no_replica_timeout_s:
            self._fail_queue(now)
        self._dispatch(now)

    def ping(self) -> None:
        """Send everybody a ping: who is gone is noticed by that, who hangs does not answer."""
        for identity in [*self.replicas, *self.clients]:
            self._send(identity, Ping())

    def _check_alive(self, now: float) -> None:
        config = self._config
        for replica in list(self.replicas.values()):
            silent, stalled = now - replica.last_heard, now - replica.last_progress
            reason = ""
            if silent >= config.silence_s:
                reason = f"it has not answered for {silent:.1f} s"
            elif stalled >= config.stall_s and replica.state != ReplicaState.PAUSED:
                reason = f"its engine has work and has not finished a step for {stalled:.0f} s"
            if reason:
                self._lose(replica, reason, now, in_order=False)
                self._send(replica.identity, Refused(f"counted as lost: {reason}."))
        for client in list(self.clients.values()):
            silent = now - client.last_heard
            if silent >= config.client_silence_s:
                self._send(client.identity, Refused("counted as lost: no answer to pings."))
                self.lost(client.identity, f"it has not answered for {silent:.0f} s", now)

    # ---- Joining and leaving -----------------------------------------------------------------

    def _welcome(self, identity: bytes, hello: ClientHello | ReplicaHello, now: float) -> None:
        if hello.protocol != PROTOCOL:
            self._send(
                identity,
                Refused(
                    f"it speaks protocol {hello.protocol}, the coordinator {PROTOCOL}: install the "
                    "same version of megatron_async on both."
                ),
            )
            return
        self.lost(identity, "it said hello again", now)
        if isinstance(hello, ReplicaHello):
            self._replace(hello.info, now)
            refusal = why_refused(hello.info, self.replicas.values())
            if refusal:
                logger.warning("Replica %s is refused: %s", hello.info.name, refusal)
                self._send(identity, Refused(refusal))
                return
            self.replicas[identity] = ReplicaRecord(identity, hello.info, now)
            logger.info("Replica %s joined; %d now.", hello.info.name, len(self.replicas))
        else:
            self.clients[identity] = ClientRecord(identity, now)
        self._send(identity, Welcome(self._config.silence_s))
        if (replica := self.replicas.get(identity)) is not None:
            self.verbs.joined(replica)

    def _replace(self, info: ReplicaInfo, now: float) -> None:
        """A replica that connects again has forgotten what it was given."""
        for old in list(self.replicas.values()):
            if old.info.instance == info.instance:
                self._lose(old, "it connected again", now, in_order=False)

    def _lose(self, replica: ReplicaRecord, reason: str, now: float, in_order: bool) -> None:
        del self.replicas[replica.identity]
        self.verbs.lost(replica.identity)
        self._departed = f"{replica.name}: {reason}"
        note = logger.info if in_order else logger.warning
        note(
            "Replica %s is gone (%s) with %d unfinished requests; %d replicas left.",
            replica.name, reason, len(replica.requests), len(self.replicas),
        )  # fmt: skip
        self._hand_over(replica, reason, in_order)

    def _hand_over(self, replica: ReplicaRecord, reason: str, in_order: bool) -> None:
        """What a replica will not finish is served again elsewhere, or ends here."""
        for request in list(replica.requests.values()):
            if request.is_aborted:
                self._end_here(request, "RequestAborted", "aborted by its client")
            elif in_order or request.may_be_served_again(self._config):
                self.counters["retried"] += 1
                del replica.requests[request.number]
                request.give_to(None)
                self.queue.add(request)
            else:
                why = why_not_again(request, replica.name, reason, self._config)
                self._end_here(request, "ReplicaLost", why)

    def _let_go(self, replica: ReplicaRecord) -> None:
        """A replica that is to leave may, once it has nothing left."""
        if replica.state == ReplicaState.LEAVING and not replica.requests:
            self._send(replica.identity, Leave())

    # ---- Replicas ----------------------------------------------------------------------------

    def _hear_replica(self, replica: ReplicaRecord, message: ToCoordinator, now: float) -> None:
        match message:
            case ReplicaStatus():
                replica.heard(message, now)
            case Batch():
                for event in message.events:
                    request = replica.requests.get(event.number)
                    if request is not None:
                        self._hear_event(replica, request, event)
            case Done():
                self.verbs.done(replica.identity, message)
            case Leaving():
                self._set_state(replica, ReplicaState.LEAVING)
            case Helping():
                replica.state = ReplicaState.HELPING
                self._hand_over(replica, "it left in order", in_order=True)
                logger.info("Replica %s has left, and helps those of its job.", replica.name)
            case Goodbye():
                reason = message.failure or "it left in order"
                self._lose(replica, reason, now, in_order=not message.failure)
            case _:
                logger.warning("Replica %s sent a client's message.", replica.name)

    def _hear_event(
        self, replica: ReplicaRecord, request: RoutedRequest, event: Chunk | Started | Ended
    ) -> None:
        if isinstance(event, Started):
            request.has_started = True
            return
        if isinstance(event, Ended):
            if not request.contradicts(event.completion):
                replica.completed += event.completion.failure is None
                self._end(request, event.completion)
                return
        elif (new := request.news(event)) is not None:
            if new[0] or new[1]:
                self._send(request.client, Chunk(request.asked.number, *new))
            return
        else:
            self._abort_at_replica(request)
        self._end_here(
            request, "ReplicaLost",
            f"its replica was lost, and replica {replica.name} continues otherwise than the "
            f"{len(request.delivered)} tokens that were delivered: near ties fall differently in "
            "other batches below float32.",
        )  # fmt: skip

    def _dispatch(self, now: float) -> None:
        """Give queued requests to replicas that have room; none has two suspects, or who is
        innocent would die with who is not."""
        for suspects in (True, False):
            while (request := self.queue.first(suspects)) is not None:
                ready = [r for r in self.replicas.values() if self._has_room(r, suspects)]
                if not ready:
                    break
                self._give(request, ready, now)

    def _give(self, request: RoutedRequest, ready: list[ReplicaRecord], now: float) -> None:
        """Give a request to one of these replicas."""
        self.queue.discard(request)
        by_name = {replica.name: replica for replica in ready}
        # Replicas of one model have one block size, or a prefix would not be comparable.
        hashes, blocks = ready[0].hashes_of(request), ready[0].blocks_of(request)
        candidates = [replica.candidate() for replica in ready]
        chosen, match = self._config.policy.choose(candidates, hashes, blocks)
        replica = by_name[chosen.name]
        self.counters["prefix_blocks"] += match
        request.give_to(replica)
        request.given_at = now
        if not replica.requests:
            replica.last_progress = now
        replica.given(request, hashes, match)
        self._send(replica.identity, request.run())

    def _has_room(self, replica: ReplicaRecord, for_suspect: bool) -> bool:
        most = max(self._config.requests_per_slot * replica.info.slots, 1)
        has_room = replica.state == ReplicaState.READY and len(replica.requests) < most
        return has_room and not (for_suspect and replica.has_suspect)

    # ---- Clients -----------------------------------------------------------------------------

    def _hear_client(self, client: ClientRecord, message: ToCoordinator, now: float) -> None:
        match message:
            case Generate():
                self._take(client, message, now)
            case Abort():
                if (request := client.requests.get(message.number)) is not None:
                    self.abort_request(request)
            case Ask(replica="") if message.what in VERBS:
                self.verbs.ask(client.identity, message)
            case Ask():
                try:
                    value = self._do(message.what, message.replica)
                    answer = Answer(message.number, value)
                except ValueError as error:
                    answer = Answer(message.number, failure=("ValueError", str(error)))
                self._send(client.identity, answer)
            case Goodbye():
                self.lost(client.identity, message.failure or "it left", now)
            case Pong():
                pass
            case _:
                logger.warning("A client sent a replica's message.")

    def _take(self, client: ClientRecord, asked: Generate, now: float) -> None:
        self.counters["received"] += 1
        if asked.number in client.requests:
            logger.warning("A client used the number %d twice.", asked.number)
            return
        if text := self.verbs.why_refused() or self._why_too_many():
            self.counters["refused"] += 1
            refused = Completion(finish_reason="error", failure=("Overloaded", text))
            self._send(client.identity, Ended(asked.number, refused))
            return
        request = RoutedRequest(next(self._numbers), client.identity, asked, received_at=now)
        self.requests[request.number] = client.requests[asked.number] = request
        self.queue.add(request)

    def _why_too_many(self) -> str:
        """Why no further request is taken; "" if it is."""
        if len(self.requests) < self._config.max_unfinished:
            return ""
        return (
            f"{len(self.requests)} requests are unfinished, and max_unfinished is "
            f"{self._config.max_unfinished}: send the request again later, or add replicas."
        )

    def abort_request(self, request: RoutedRequest) -> None:
        """End a request that its client, or an administrator, wants no more of."""
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
        self._end(request, Completion(finish_reason=reason, failure=(kind, text)))

    def _end(self, request: RoutedRequest, completion: Completion) -> None:
        kind = None if completion.failure is None else completion.failure[0]
        outcome = "completed" if kind is None else "failed"
        self.counters["aborted" if kind == "RequestAborted" else outcome] += 1
        self._forget(request)
        self._count_end(request, completion)
        client = self.clients.get(request.client)
        if client is not None:
            client.requests.pop(request.asked.number, None)
            told = msgspec.structs.replace(completion, attempts=request.attempts)
            self._send(request.client, Ended(request.asked.number, told))

    def _count_end(self, request: RoutedRequest, completion: Completion) -> None:
        tokens = len(completion.generated_tokens)
        self.service.generated(tokens)
        self.service.ended(
            completion.finish_reason,
            prompt_tokens=len(completion.prompt_tokens),
            generated_tokens=tokens,
            wait_s=max(request.given_at - request.received_at, 0.0),
            ttft=completion.ttft,
            latency=completion.latency,
        )

    def _forget(self, request: RoutedRequest) -> None:
        del self.requests[request.number]
        self.queue.discard(request)
        if request.replica is not None:
            request.replica.requests.pop(request.number, None)
            self._let_go(request.replica)

    def _fail_queue(self, now: float) -> None:
        waited = now - self._replica_there
        why = why_nobody_serves(self.replicas.values(), self._departed, waited)
        for request in self.queue.in_order():
            self._end_here(request, "ReplicaLost", why)

    # ---- Control and statistics --------------------------------------------------------------

    def _do(self, what: str, name: str) -> dict[str, object]:
        if what == "stats":
            return self.stats()
        replica = find_replica(name, self.replicas.values())
        state = state_after(what, replica)
        if state != replica.state or not state.is_departing:
            self._set_state(replica, state)
        return {}

    def _set_state(self, replica: ReplicaRecord, state: ReplicaState) -> None:
        replica.state = state
        # Who leaves or drains has requests to finish, though it may have been paused before.
        self._send(replica.identity, SetPaused(state == ReplicaState.PAUSED))
        self._let_go(replica)

    def stats(self) -> dict[str, object]:
        """Counters since the start, and all replicas by name."""
        return {
            **service_stats(self.counters, self.requests, len(self.clients), self.replicas),
            "state": self.verbs.state_name(),
            "service": self.service.as_dict(),
        }
