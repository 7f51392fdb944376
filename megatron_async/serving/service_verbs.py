"""`ServiceVerbs`: commands of an administrator to the whole service, and the resulting state.

Only decisions, as in the `Dispatcher`: no sockets, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megatron_async.serving.messages import Answer, Ask, Do, Done
from megatron_async.serving.records import ReplicaRecord, ReplicaState
from megatron_async.serving.request_books import RequestBooks

COMMANDS = {
    "pause": ReplicaState.PAUSED,
    "drain": ReplicaState.DRAINING,
    "resume": ReplicaState.READY,
    "remove": ReplicaState.LEAVING,
}


def find_replica(name: str, replicas: Collection[ReplicaRecord]) -> ReplicaRecord:
    """The replica of that name.

    Raises:
        ValueError: there is none.
    """
    for replica in replicas:
        if replica.name == name:
            return replica
    there = ", ".join(sorted(replica.name for replica in replicas)) or "none"
    raise ValueError(f"there is no replica named {name!r}; there are: {there}.")


def state_after(what: str, replica: ReplicaRecord) -> ReplicaState:
    """The state of a replica after a command.

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
    if what == "pause" and replica.info.shares_experts:
        raise ValueError(
            f"replica {replica.name!r} cannot stand still, because others of its job need its "
            "experts: drain it, and it is given no further requests."
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
VERBS = ("health", "pause", "resume", "drain", "abort", "shutdown", *OF_REPLICAS)
UNASKED = -1
"""Number of a `Do` that nobody waits for."""
REFUSALS = {ServiceState.DRAINING: "the service ends, or was told to take no further requests"}
PAUSE_MODES = ("keep", "abort")


@dataclass
class Question:
    """A verb that replicas must do before its answer.

    Attributes:
        asker: identity of the client.
        waiting: identities of replicas that have not answered.
        answers, failures: of those that could, and could not, by name.
    """

    asker: bytes
    ask: Ask
    waiting: set[bytes]
    answers: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, tuple[str, str]] = field(default_factory=dict)


class ServiceVerbs:
    """The state of a service, and how it changes.

    Attributes:
        had_replica: whether one has ever joined: without one it loads, later it restarts.
        is_given_up: whether the starter of the replicas expects no further one.
        on_shutdown: ends the coordinator for a client; None: no client may.
    """

    def __init__(self, books: RequestBooks) -> None:
        self._books = books
        self._questions: dict[int, Question] = {}
        self._next = 0
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
        "dead", unless it takes no requests anyway."""
        if self.state == ServiceState.DRAINING:
            return str(self.state)
        if not any(not replica.state.is_departing for replica in self._books.replicas.values()):
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
            failed = Answer(ask.number, failure=("ValueError", str(error)))
            self._books.tell(asker, failed)
            return
        if answer is not None:
            self._books.tell(asker, Answer(ask.number, answer))

    def joined(self, replica: ReplicaRecord) -> None:
        """A replica has joined: it gets the state of the service."""
        self.had_replica = True
        if self.holds_queue:
            self._set(replica, ReplicaState.PAUSED)

    def lost(self, identity: bytes) -> None:
        """A replica or a client is lost: do not wait for the replica; do not answer the client."""
        for key, question in list(self._questions.items()):
            if question.asker == identity:
                del self._questions[key]
            elif identity in question.waiting:
                question.waiting.discard(identity)
                self._settle(key, question)

    def done(self, identity: bytes, done: Done) -> None:
        """A replica has done a verb, or has failed to."""
        question = self._questions.get(done.number)
        if question is None or identity not in question.waiting:
            return
        question.waiting.discard(identity)
        replica = self._books.replicas.get(identity)
        name = "" if replica is None else replica.name
        if done.failure is None:
            question.answers[name] = done.value
        else:
            question.failures[name] = done.failure
        self._settle(done.number, question)

    # ---- Verbs -------------------------------------------------------------------------------

    def _do(self, asker: bytes, ask: Ask) -> dict[str, Any] | None:
        replicas = self._books.replicas.values()
        match ask.what:
            case "health":
                ready = sum(replica.state == ReplicaState.READY for replica in replicas)
                return {"state": self.state_name(), "replicas": ready}
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
            case "sleep":
                self._stand_still(replicas)
                self.state = ServiceState.SLEEPING
            case "shutdown":
                if self.on_shutdown is None:
                    raise ValueError(
                        "this coordinator is not ended by clients: send SIGTERM to its process."
                    )
                self.on_shutdown()
                return {}
            case "wake" if self.state != ServiceState.SLEEPING:
                return {"replicas": {}}
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
        if any(replica.info.shares_experts for replica in replicas):
            raise ValueError(
                "replicas whose experts others need cannot stand still: drain the service."
            )

    def _stand_still(self, replicas: Collection[ReplicaRecord]) -> None:
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

    def _ask_replicas(self, asker: bytes, ask: Ask) -> None:
        there = {
            identity
            for identity, replica in self._books.replicas.items()
            if not replica.state.is_departing
        }
        question = Question(asker, ask, there)
        key = self._next
        self._next += 1
        self._questions[key] = question
        for identity in list(there):
            self._books.tell(identity, Do(key, ask.what, ask.fields))
        self._settle(key, question)

    def _settle(self, key: int, question: Question) -> None:
        """Answer a question that no replica has left to answer."""
        if question.waiting or key not in self._questions:
            return
        del self._questions[key]
        if question.failures:
            failures = sorted(question.failures.items())
            text = "; ".join(f"{name}: {kind}: {why}" for name, (kind, why) in failures)
            is_asker = all(kind == "ValueError" for kind, _ in question.failures.values())
            kind = "ValueError" if is_asker else "RuntimeError"
            answer = Answer(question.ask.number, failure=(kind, text))
        else:
            answer = Answer(question.ask.number, {"replicas": question.answers})
            if question.ask.what == "wake":
                self._go_on(self._books.replicas.values())
            elif question.ask.what == "signal":
                confirm = Do(UNASKED, "confirm", question.ask.fields)
                for replica in self._books.replicas.values():
                    self._books.tell(replica.identity, confirm)
        self._books.tell(question.asker, answer)
