"""`Dispatcher`: a coordinator's decisions. It uses no sockets and no clock: messages come in by
`hear`, go out by a function, and the caller passes the time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from megatron_async.requests.traces import is_sampled, named
from megatron_async.serving.messages import (
    PROTOCOL,
    TOKEN_BYTES,
    Abort,
    Again,
    Answer,
    Ask,
    Card,
    ClientHello,
    Done,
    Ended,
    Generate,
    Goodbye,
    Helping,
    Leaving,
    Moved,
    NewModel,
    Ping,
    Pong,
    Refused,
    ReplicaHello,
    ReplicaStatus,
    StepTokens,
    ToClient,
    ToCoordinator,
    ToReplica,
    Welcome,
)
from megatron_async.serving.reasons import (
    one_line,
    service_stats,
    why_nobody_serves,
    why_not_again,
    why_refused,
    wrong_protocol,
)
from megatron_async.serving.records import (
    ClientRecord,
    CoordinatorConfig,
    ReplicaRecord,
    ReplicaState,
    RoutedRequest,
    tokens_of,
)
from megatron_async.serving.request_books import RequestBooks, as_told
from megatron_async.serving.service_verbs import VERBS, ServiceVerbs, find_replica, state_after

logger = logging.getLogger("megatron_async")


class Dispatcher(RequestBooks):
    """Decides which replica serves a request, and what happens to requests of a lost replica.
    `send` sends a message to an identity. It never fails; a peer that cannot be reached is reported
    by `lost`. Times are seconds.

    Attributes:
        verbs: an administrator's commands to the whole service, and its state.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        send: Callable[[bytes, ToClient | ToReplica], None],
        now: float,
        first: int = 0,
    ) -> None:
        super().__init__(config, send, first)
        self._indexes = count()
        self._card: Card | None = None
        """The card of the one model that the replicas serve."""
        self._last_ping = now
        self._replica_there = now
        self._departed = ""
        self.verbs = ServiceVerbs(self)

    # ---- What comes in -----------------------------------------------------------------------

    def hear(self, identity: bytes, message: ToCoordinator, now: float) -> None:
        """Handle a message."""
        if isinstance(message, (ClientHello, ReplicaHello)):
            self._welcome(identity, message, now)
        elif (replica := self.replicas.get(identity)) is not None:
            replica.last_heard = now
            self._hear_replica(replica, message, now)
        elif (client := self.clients.get(identity)) is not None:
            client.last_heard = now
            self._hear_client(client, message, now)
        else:
            self._send(identity, Refused("the coordinator does not know you: connect again."))
        is_step = isinstance(message, StepTokens) and not message.ends
        if not is_step or self.queue.first(suspects=True) is not None:
            self._dispatch(now)

    def lost(self, identity: bytes, reason: str, now: float) -> None:
        """A peer is lost."""
        if (client := self.clients.pop(identity, None)) is not None:
            if client.requests and self.verbs.why_refused():
                logger.info("%d requests are aborted, as the service ends.", len(client.requests))
            elif client.requests:
                logger.warning("A client is gone: %s; its requests are aborted.", one_line(reason))
            for request in list(client.requests.values()):
                self._abort_at_replica(request)
                self._forget(request)
                self.counters["aborted"] += 1
        elif (replica := self.replicas.get(identity)) is not None:
            self._lose(replica, reason, now, in_order=False)
        self._dispatch(now)

    def tick(self, now: float) -> None:
        """Ping all peers when it is time, and find silent ones."""
        config = self._config
        if now - self._last_ping >= config.ping_interval_s:
            self._last_ping = now
            self.ping()
            self._check_alive(now)
        self.verbs.weights.tick(now)
        if any(replica.may_serve for replica in self.replicas.values()):
            self._replica_there = now
        elif self.verbs.holds_queue:
            pass
        elif self.queue and (waited := now - self._replica_there) >= config.no_replica_timeout_s:
            why = why_nobody_serves(self.replicas.values(), self._departed, waited)
            for request in self.queue.in_order():
                self._end_here(request, "ReplicaLost", why)
        self._dispatch(now)

    def ping(self) -> None:
        """Send all peers a ping: a lost peer fails to receive it, a hanging one does not answer."""
        for identity in [*self.replicas, *self.clients]:
            self._send(identity, Ping())

    def _check_alive(self, now: float) -> None:
        config = self._config
        for replica in list(self.replicas.values()):
            if reason := replica.why_lost(now, config):
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
            self._send(identity, Refused(wrong_protocol(hello.protocol)))
            return
        self.lost(identity, "it said hello again", now)
        if isinstance(hello, ReplicaHello):
            for old in list(self.replicas.values()):
                # One that comes again has dropped its requests.
                if old.info.instance == hello.info.instance:
                    self._lose(old, "it connected again", now, in_order=False)
            refusal = why_refused(hello.info, self.replicas.values())
            if refusal:
                logger.warning("Replica %s is refused: %s", one_line(hello.info.name), refusal)
                self._send(identity, Refused(refusal))
                return
            replica = ReplicaRecord(identity, hello.info, now, next(self._indexes))
            self.replicas[identity] = replica
            wants_card = self._card is None or self._card.digest != hello.info.card
            self._send(identity, Welcome(self._config.silence_s, wants_card))
            self.verbs.joined(replica, hello.weights)
            logger.info("Replica %s joined; %d now.", hello.info.name, len(self.replicas))
        else:
            client = ClientRecord(identity, now, next(self._indexes))
            self.clients[identity] = client
            self._send(identity, Welcome(self._config.silence_s))

    def _lose(self, replica: ReplicaRecord, reason: str, now: float, in_order: bool) -> None:
        del self.replicas[replica.identity]
        reason = one_line(reason)
        self.verbs.lost(replica.identity)
        self._departed = f"{replica.name}: {reason}"
        note = logger.info if in_order else logger.warning
        note(
            "Replica %s is gone (%s) with %d unfinished requests; %d replicas left.",
            replica.name, reason, len(replica.requests), len(self.replicas),
        )  # fmt: skip
        self._hand_over(replica, list(replica.requests.values()), reason, in_order)

    def give_back(self, identity: bytes, number: int, now: float) -> None:
        """A replica that leaves will not begin a request that it was given."""
        replica = self.replicas.get(identity)
        if replica is not None and (request := replica.requests.get(number)) is not None:
            self._hand_over(replica, [request], "it leaves", in_order=True)
            self._let_go(replica)
            self._dispatch(now)

    def _hand_over(
        self, replica: ReplicaRecord, requests: Sequence[RoutedRequest], reason: str, in_order: bool
    ) -> None:
        """Requests that a replica will not finish are served again elsewhere, or fail."""
        for request in requests:
            if request.is_aborted:
                self._end_here(request, "RequestAborted", "aborted by its client")
            elif in_order or request.may_be_served_again(self._config):
                self.counters["retried"] += 1
                if trace := request.asked.traceparent:
                    logger.warning("%s is served again.", named(request.number, trace))
                del replica.requests[request.number]
                if request.has_started:
                    self._send(request.client, Again(request.asked.number))
                    request.moved = {}
                request.give_to(None)
                self.queue.add(request)
            else:
                why = why_not_again(request, replica.name, reason, self._config)
                self._end_here(request, "ReplicaLost", why)

    def _move(self, replica: ReplicaRecord, moved: Moved) -> None:
        """Another replica goes on with a request; its client has all tokens so far."""
        if (request := replica.requests.get(moved.number)) is None:
            return
        if request.is_aborted:
            self._end_here(request, "RequestAborted", "aborted by its client")
            return
        self.counters["moved"] += 1
        del replica.requests[request.number]
        request.give_to(None)
        request.attempts -= 1
        request.moved, request.left = moved.data, replica
        self.queue.add(request)
        self._let_go(replica)

    # ---- Replicas ----------------------------------------------------------------------------

    def _hear_replica(self, replica: ReplicaRecord, message: ToCoordinator, now: float) -> None:
        match message:
            case ReplicaStatus():
                replica.heard(message, now)
                if message.is_torn:
                    self.verbs.weights.tear(replica)
            case StepTokens():
                self._hear_tokens(replica, message, now)
            case Card():
                before, self._card = self._card, message
                if before is not None and before.digest != message.digest:
                    for identity in self.clients:
                        self._send(identity, NewModel())
            case Done():
                self.verbs.done(replica.identity, message)
            case Moved():
                self._move(replica, message)
            case Leaving():
                self.set_state(replica, ReplicaState.LEAVING)
            case Helping():
                replica.state = ReplicaState.HELPING
                requests = list(replica.requests.values())
                self._hand_over(replica, requests, "it left in order", in_order=True)
                logger.info("Replica %s has left, and helps those of its job.", replica.name)
            case Goodbye():
                reason = message.failure or "it left in order"
                self._lose(replica, reason, now, in_order=not message.failure)
            case _:
                logger.warning("Replica %s sent a client's message.", replica.name)

    def _hear_tokens(self, replica: ReplicaRecord, message: StepTokens, now: float) -> None:
        """Send each client its part of a step: Python per client and per end, not per token."""
        try:
            parts = self._parts_of(replica, message)
        except ValueError as error:
            reason = f"it told tokens that cannot be read ({error})"
            self._lose(replica, reason, now, in_order=False)
            self._send(replica.identity, Refused(f"{reason}: connect again."))
            return
        num_bytes = sum(len(part.tokens) for part in parts.values())
        self.service.generated(num_bytes // TOKEN_BYTES)
        for ended in message.ends:
            if (request := replica.requests.get(ended.number)) is not None:
                replica.completed += ended.failure is None
                # One that ended by itself before the replica knew has its whole answer.
                is_cut = request.is_aborted and ended.failure is not None
                if is_cut and (why := self.verbs.why_refused()):
                    failure = ("RequestAborted", f"aborted: {why}.")
                    ended = msgspec.structs.replace(ended, failure=failure)
                self._part_of(parts, request).ends.append(as_told(request, ended))
                self._finish(request, ended)
        identities = {client.index: identity for identity, client in self.clients.items()}
        for index, part in parts.items():
            if (identity := identities.get(index)) is not None:
                self._send(identity, part)

    def _dispatch(self, now: float) -> None:
        """Give queued requests to replicas that have room. None gets two suspects (requests whose
        replica died): two could fail a harmless one."""
        for suspects in (True, False):
            while (request := self.queue.first(suspects)) is not None:
                if not (ready := self._ready(suspects)):
                    break
                self.queue.discard(request)
                others = [each for each in ready if each is not request.left]
                self._give(request, others or ready, now)

    def _ready(self, for_suspect: bool) -> list[ReplicaRecord]:
        """Replicas that have room."""
        most = self._config.requests_per_slot
        return [
            each
            for each in self.replicas.values()
            if each.state == ReplicaState.READY
            and not each.is_stale
            and len(each.requests) < max(most * each.info.slots, 1)
            and not (for_suspect and each.has_suspect)
        ]

    def _give(self, request: RoutedRequest, ready: list[ReplicaRecord], now: float) -> None:
        """Give a request that is not queued, or not any more, to one of these replicas."""
        is_chosen = len(ready) == 1
        if is_chosen:  # it need not wait for hashes
            self._send_to(request, ready[0], now)
        by_name = {replica.name: replica for replica in ready}
        # Replicas of one model have one block size, or a prefix would not be comparable.
        hashes, blocks = ready[0].hashes_of(request), ready[0].blocks_of(request)
        candidates = [replica.candidate() for replica in ready]
        chosen, match = self._config.policy.choose(candidates, hashes, blocks)
        replica = by_name[chosen.name]
        if not is_chosen:
            self._send_to(request, replica, now)
        self.counters["prefix_blocks"] += match
        if not replica.requests:
            replica.last_progress = now
        replica.given(request, hashes, match)

    def _send_to(self, request: RoutedRequest, replica: ReplicaRecord, now: float) -> None:
        """Send a request to a replica; it is booked after that."""
        if is_sampled(trace := request.asked.traceparent):
            logger.info("%s goes to replica %s.", named(request.number, trace), replica.name)
        self._send(replica.identity, request.run())
        request.give_to(replica)
        request.given_at = now

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
                    value = self._do(message)
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
        why = self.verbs.why_refused() or self.verbs.weights.why_refused
        if why := why or self.in_flight.why_too_many(asked.owner, tokens_of(asked)):
            self.counters["refused"] += 1
            refused = Ended(asked.number, "error", ("Overloaded", why))
            self._send(client.identity, StepTokens(ends=[refused]))
            return
        number = self.routes.add(client.index, asked.number)
        request = RoutedRequest(number, client.identity, asked, self.routes, received_at=now)
        self.requests[request.number] = client.requests[asked.number] = request
        self.in_flight.count(request, 1)
        ready = [] if self.queue else self._ready(False)
        if ready:  # nobody is before it
            self._give(request, ready, now)
        else:
            self.queue.add(request)

    # ---- Control and statistics --------------------------------------------------------------

    def _do(self, ask: Ask) -> dict[str, object]:
        if ask.what == "stats":
            return self.stats()
        if ask.what == "card":
            if (card := self._card) is None:
                return {}
            is_known = ask.fields.get("digest") == card.digest
            return {"digest": card.digest} | ({} if is_known else {"card": card.data})
        replica = find_replica(ask.replica, self.replicas.values())
        state = state_after(ask.what, replica, self.verbs.holds_queue)
        if state != replica.state or not state.is_departing:
            self.set_state(replica, state)
        return {}

    def stats(self) -> dict[str, object]:
        """Counters since the start, and all replicas by name."""
        return {
            **service_stats(self.counters, self.requests, len(self.clients), self.replicas),
            "unfinished_tokens": self.in_flight.tokens,
            "state": self.verbs.state_name(),
            "service": self.service.as_dict(),
        }
