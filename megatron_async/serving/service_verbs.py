"""`ServiceVerbs`: commands of an administrator to the whole service, and the resulting state.

Only decisions, as in the `Dispatcher`: no sockets, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from functools import partial
from typing import Any

from megatron_async.errors import UnknownReplica
from megatron_async.serving.messages import Answer, Ask, Do, Done, SetPaused, Weights, kind_of
from megatron_async.serving.questions import Question, Questions
from megatron_async.serving.records import ReplicaRecord, ReplicaState
from megatron_async.serving.request_books import RequestBooks
from megatron_async.serving.weight_rounds import WEIGHT_VERBS, WeightRounds

COMMANDS = {
    "pause": ReplicaState.PAUSED,
    "drain": ReplicaState.DRAINING,
    "resume": ReplicaState.READY,
    "remove": ReplicaState.LEAVING,
}


def find_replica(name: str, replicas: Collection[ReplicaRecord]) -> ReplicaRecord:
    """The replica of that name.

    Raises:
        UnknownReplica: there is none.
    """
    for replica in replicas:
        if replica.name == name:
            return replica
    there = ", ".join(sorted(replica.name for replica in replicas)) or "none"
    raise UnknownReplica(f"there is no replica named {name!r}; there are: {there}.")


def state_after(what: str, replica: ReplicaRecord, stands: bool = False) -> ReplicaState:
    """The state of a replica after a command; `stands`: the whole service is paused or sleeps.

    Raises:
        ValueError: there is no such command, or this replica cannot follow it.
    """
    if what not in COMMANDS:
        raise ValueError(f"{what!r} is no command; there are: stats, {', '.join(COMMANDS)}.")
    if replica.state.is_departing:
        if what == "remove":
            return replica.state
        raise ValueError(
            f"replica {replica.name!r} cannot {what}: it is leaving. Start another one."
        )
    if replica.info.shares_experts and (stands or what == "pause"):
        raise ValueError(
            f"replica {replica.name!r} cannot {what} alone, because others of its job need its "
            "experts: "
            + ("resume the service first." if stands else "drain it, or pause the whole service.")
        )
    return COMMANDS[what]


class ServiceState(StrEnum):
    """State of a service: how it treats requests."""

    RUNNING = "running"
    DRAINING = "draining"
    """Finishes its requests and refuses new ones."""
    PAUSED = "paused"
    """The engines run no steps; requests wait."""
    SLEEPING = "sleeping"
    """Paused, and its engines have freed their device memory."""


OF_REPLICAS = ("sleep", "wake", "reset_prefix_cache", "profile", "watch", "signal")
"""Verbs that every replica must do; the answer says what each told."""
VERBS = (
    "health", "pause", "resume", "drain", "abort", "move", "shutdown", *OF_REPLICAS, *WEIGHT_VERBS,
)  # fmt: skip
UNASKED = -1
"""Number of a `Do` that nobody waits for."""
REFUSALS = {ServiceState.DRAINING: "the service ends, or was told to take no further requests"}
PAUSE_MODES = ("keep", "abort")


class ServiceVerbs:
    """The state of a service, and how it changes.

    Attributes:
        weights: the updates of the weights.
        had_replica: whether one has ever joined: without one it loads, later it restarts.
        is_given_up: whether the starter of the replicas expects no further one.
        on_shutdown: ends the coordinator for a client; None: no client may.
    """

    def __init__(self, books: RequestBooks) -> None:
        self._books = books
        self._questions = Questions(books)
        self.weights = WeightRounds(books, self._questions)
        self.state = ServiceState.RUNNING
        self.had_replica = self.is_given_up = False
        self.on_shutdown: Callable[[], None] | None = None

    @property
    def holds_queue(self) -> bool:
        """Whether replicas get no requests, because they are paused."""
        return self.state in (ServiceState.PAUSED, ServiceState.SLEEPING)

    def why_refused(self) -> str:
        """Why further requests are refused; "" if they are accepted."""
        return REFUSALS.get(self.state, "")

    def state_name(self) -> str:
        """The state as people see it: without replicas a service is "loading", "restarting" or
        "dead", and "stale" if none has its weights, unless it takes no requests or sleeps."""
        if self.state in (ServiceState.DRAINING, ServiceState.SLEEPING):
            return str(self.state)
        there = [each for each in self._books.replicas.values() if not each.state.is_departing]
        if there and all(each.is_stale for each in there):
            return "stale"
        if not there:
            if not self.had_replica:
                return "loading"
            return "dead" if self.is_given_up else "restarting"
        return str(self.state)

    def ask(self, asker: bytes, ask: Ask) -> None:
        """Do what a client asks of the service; the answer goes out now, or when all replicas
        have done it."""
        try:
            answer = self._do(asker, ask)
        except (ValueError, TypeError) as error:
            failed = Answer(ask.number, failure=(kind_of(error), str(error)))
            self._books.tell(asker, failed)
            return
        if answer is not None:
            self._books.tell(asker, Answer(ask.number, answer))

    def joined(self, replica: ReplicaRecord, weights: Weights) -> None:
        """A replica has joined, with these weights: it gets the state of the service."""
        self.had_replica = True
        self.weights.joined(replica, weights)
        if self.holds_queue:
            self._set(replica, ReplicaState.PAUSED)
        elif replica.info.shares_experts:  # it may still stand, as the last coordinator has told
            self._set(replica, ReplicaState.READY)

    def lost(self, identity: bytes) -> None:
        """A replica is lost: it is not waited for."""
        self.weights.lost(identity)
        self._questions.lost(identity)

    def done(self, identity: bytes, done: Done) -> None:
        """A replica has done a verb, or has failed to."""
        self._questions.done(identity, done)

    # ---- Verbs -------------------------------------------------------------------------------

    def _do(self, asker: bytes, ask: Ask) -> dict[str, Any] | None:
        replicas = self._books.replicas.values()
        match ask.what:
            case "health":
                ready = sum(replica.shown_state == ReplicaState.READY for replica in replicas)
                state = {"state": self.state_name(), "replicas": ready}
                return state | self.weights.health()
            case "pause":
                return self._pause(replicas, str(ask.fields.get("mode", "keep")))
            case "resume":
                if self.state == ServiceState.SLEEPING:
                    raise ValueError("the service sleeps: wake it.")
                return self._go_on(replicas)
            case "drain":
                if self.holds_queue:
                    raise ValueError(f"the service is {self.state}, and would never be done.")
                self.state = ServiceState.DRAINING
                return {"unfinished_requests": len(self._books.requests)}
            case "abort":
                return self._abort(ask.fields)
            case "move":
                self._move(asker, ask)
                return None
            case "sleep":
                self._stand_still(replicas)
                self._ask_replicas(asker, ask)
                self.state = ServiceState.SLEEPING
                return None
            case "shutdown":
                if self.on_shutdown is None:
                    raise ValueError(
                        "this coordinator is not ended by clients: send SIGTERM to its process."
                    )
                self.on_shutdown()
                return {}
            case "wake" if self.state != ServiceState.SLEEPING:
                return {"replicas": {}}
            case what if what in WEIGHT_VERBS:
                return self.weights.do(asker, ask)
        self._ask_replicas(asker, ask)
        return None

    def _pause(self, replicas: Collection[ReplicaRecord], mode: str) -> dict[str, Any]:
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode={mode!r} must be one of {', '.join(PAUSE_MODES)}.")
        if self.state == ServiceState.SLEEPING:
            raise ValueError("the service sleeps already.")
        self._check_can_stand(replicas)  # before anything is lost
        aborted = self._abort({"all": True})["aborted"] if mode == "abort" else 0
        self._stand_still(replicas)
        self.state = ServiceState.PAUSED
        return {"aborted": aborted}

    def _check_can_stand(self, replicas: Collection[ReplicaRecord]) -> None:
        for replica in replicas:
            if replica.info.shares_experts and replica.state == ReplicaState.LEAVING:
                raise ValueError(
                    f"replica {replica.name!r} finishes its requests, as it leaves, and needs the "
                    "experts of others, which therefore cannot stand still: try again when it has."
                )

    def _stand_still(self, replicas: Collection[ReplicaRecord]) -> None:
        """Replicas that share experts stop at one step: the first that is told steps on for the
        others until all of them were told."""
        self._check_can_stand(replicas)
        for replica in replicas:
            self._set(replica, ReplicaState.PAUSED)

    def _go_on(self, replicas: Collection[ReplicaRecord]) -> dict[str, Any]:
        self.state = ServiceState.RUNNING
        for replica in replicas:
            self._set(replica, ReplicaState.READY)
        return {}

    def _set(self, replica: ReplicaRecord, state: ReplicaState) -> None:
        if not replica.state.is_departing:
            self._books.set_state(replica, state)
        elif replica.info.shares_experts:  # it steps with the others, or stops with them
            self._books.tell(replica.identity, SetPaused(state == ReplicaState.PAUSED))

    def _abort(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        label, everything = fields.get("label"), fields.get("all") is True
        if not everything and (not isinstance(label, str) or not label):
            raise ValueError("say which request to abort: label=ID, or all=true.")
        requests = [
            request
            for request in list(self._books.requests.values())
            if everything or request.asked.label == label
        ]
        for request in requests:
            self._books.abort_request(request)
        return {"aborted": len(requests)}

    def _move(self, asker: bytes, ask: Ask) -> None:
        """Other replicas go on with the requests of a label, or with all of a replica, which gets
        no more until it is resumed."""
        label, name = ask.fields.get("label"), ask.fields.get("replica")
        if (label is None) == (name is None) or not isinstance(label or name, str):
            raise ValueError("say what moves: label=ID, or replica=NAME for all of its requests.")
        replicas = self._books.replicas.values()
        source = None if name is None else find_replica(name, replicas)
        numbers: dict[bytes, list[int]] = {}
        for request in self._books.requests.values():
            if (there := request.replica) is not None and (
                request.asked.label == label if source is None else there is source
            ):
                numbers.setdefault(there.identity, []).append(request.number)
        ready = [
            each.identity
            for each in replicas
            if each.state == ReplicaState.READY and not each.is_stale
        ]
        for identity in {*numbers, *([] if source is None else [source.identity])}:
            if not any(each != identity for each in ready):
                raise ValueError("no other replica is ready to go on: start or resume one first.")
        if source is not None and not source.state.is_departing:
            self._books.set_state(source, ReplicaState.DRAINING)
        then = partial(self._answer, asker, ask, self.state)
        self._questions.put(numbers, ask.what, lambda each: {"numbers": numbers[each]}, then)

    def _ask_replicas(self, asker: bytes, ask: Ask) -> None:
        there = [
            identity
            for identity, replica in self._books.replicas.items()
            if not replica.state.is_departing
        ]
        then = partial(self._answer, asker, ask, self.state)
        self._questions.put(there, ask.what, ask.fields, then)

    def _answer(self, asker: bytes, ask: Ask, before: ServiceState, question: Question) -> None:
        """Answer a question that no replica has left to answer; a sleep that all refuse leaves the
        service as it was `before`."""
        if question.failures:
            answer = Answer(ask.number, failure=question.failure())
            if ask.what == "sleep" and not question.answers:
                if before in (ServiceState.PAUSED, ServiceState.SLEEPING):
                    self.state = before
                else:
                    self._go_on(self._books.replicas.values())
        else:
            answer = Answer(ask.number, {"replicas": question.answers})
            away = any(told.get("state") == "suspended" for told in question.answers.values())
            if ask.what == "wake" and not away:  # what is away may be woken by tags
                self._go_on(self._books.replicas.values())
            elif ask.what == "signal":
                confirm = Do(UNASKED, "confirm", ask.fields)
                for replica in self._books.replicas.values():
                    self._books.tell(replica.identity, confirm)
        self._books.tell(asker, answer)
