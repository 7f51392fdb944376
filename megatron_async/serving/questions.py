"""`Questions`: commands that replicas must do before something goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_async.serving.messages import Do, Done
from megatron_async.serving.request_books import RequestBooks

Then = Callable[["Question"], None]
"""What goes on: called once, when no replica is left to answer."""


@dataclass
class Question:
    """A command to some replicas.

    Attributes:
        waiting: identities of replicas that have not answered.
        answers, failures: of those that could, and could not, by name.
    """

    then: Then
    waiting: set[bytes]
    answers: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, tuple[str, str]] = field(default_factory=dict)

    def failure(self) -> tuple[str, str]:
        """Kind and text of all failures together: a ValueError if each of them is one."""
        found = sorted(self.failures.items())
        text = "; ".join(f"{name}: {kind}: {why}" for name, (kind, why) in found)
        is_asker = all(kind == "ValueError" for kind, _ in self.failures.values())
        return "ValueError" if is_asker else "RuntimeError", text


class Questions:
    """The commands under way. A replica that is lost is not waited for."""

    def __init__(self, books: RequestBooks) -> None:
        self._books = books
        self._open: dict[int, Question] = {}
        self._next = 0

    def put(
        self,
        identities: Iterable[bytes],
        what: str,
        fields: Mapping[str, Any] | Callable[[bytes], Mapping[str, Any]],
        then: Then,
    ) -> None:
        """Tell these replicas to do something; `fields`: of each, or a function of its identity."""
        question = Question(then, set(identities))
        key = self._next
        self._next += 1
        self._open[key] = question
        for identity in list(question.waiting):
            told = fields(identity) if callable(fields) else fields
            self._books.tell(identity, Do(key, what, dict(told)))
        self._settle(key, question)

    def lost(self, identity: bytes) -> None:
        """A replica is lost: do not wait for it."""
        for key, question in list(self._open.items()):
            if identity in question.waiting:
                question.waiting.discard(identity)
                self._settle(key, question)

    def done(self, identity: bytes, done: Done) -> None:
        """A replica has done a command, or has failed to."""
        question = self._open.get(done.number)
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

    def _settle(self, key: int, question: Question) -> None:
        if not question.waiting and self._open.pop(key, None) is not None:
            question.then(question)
