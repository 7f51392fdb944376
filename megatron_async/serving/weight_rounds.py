"""`WeightRounds`: updates of a service's weights, as a coordinator decides on them.

A round is begun on all replicas, gets its tensors, is staged on all of them, and only then is
committed. Until that the weights before serve on. A replica with other weights than the service's
is *stale* and gets no requests. No sockets and no clock: `tick` passes the time.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from megatron_async.serving.messages import Answer, Ask, Version, Weights
from megatron_async.serving.questions import Question, Questions
from megatron_async.serving.records import ReplicaRecord
from megatron_async.serving.request_books import RequestBooks
from megatron_async.serving.weight_fields import (
    Begin,
    Drop,
    Fields,
    Finish,
    Group,
    Label,
    Load,
    read_fields,
)

logger = logging.getLogger("megatron_async")

type Steps[Found] = Generator[tuple[Iterable[bytes], str, Any], Question, Found]
"""Yields questions to replicas, as `Questions.put` takes them, and goes on with what they told."""
Tell = Callable[[dict[str, Any], tuple[str, str] | None], None]
MOST_UNREAD_BYTES = 4 * (64 << 20)
"""Most bytes of tensors that replicas have not answered for: a further message is refused."""


class _Failed(Exception):
    """A verb has failed behind a question: kind and text."""


@dataclass(eq=False)
class _Round:
    """An update under way; a sender must know its key. `weights` are what replicas have after it,
    `folders` what it has loaded, if only folders, and `why` tells why it was dropped."""

    key: str
    number: int
    begin: Begin
    weights: Weights
    taking_part: set[bytes]
    expires: float = 0.0
    stage: str = "begins"  # loads, stages, commits
    folders: list[str] | None = field(default_factory=list)
    unread: int = 0
    why: str = ""
    answers: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, tuple[str, str]] = field(default_factory=dict)

    def name(self, version: Version | None) -> None:
        if version is not None:
            self.weights = replace(self.weights, version=version)

    def as_dict(self) -> dict[str, Any]:
        """For `weights_info`: without the key."""
        told = {"version": self.weights.version, "number": self.number, "stage": self.stage}
        begin = {"way": self.begin.way, "partial": self.begin.partial}
        return {**told, **begin, "source": self.begin.source.kind}


class WeightRounds:
    """The weights that a service is to have, and the round that replaces them.

    Attributes:
        wanted: the weights of the service.
        why_refused: why no replica will serve a request before the next round; "" if one will.
    """

    def __init__(self, books: RequestBooks, questions: Questions) -> None:
        self._books, self._questions = books, questions
        self._round: _Round | None = None
        self._folders: _Round | None = None
        """The round from which stale replicas are brought up."""
        self._tried: set[bytes] = set()
        """Identities of replicas that could not be brought up."""
        self._begun, self._now = 0, 0.0
        self.wanted, self.why_refused = Weights(), ""

    # ---- What replicas are ---------------------------------------------------------------------

    def joined(self, replica: ReplicaRecord, weights: Weights) -> None:
        """A replica has joined with these weights."""
        replica.weights = weights
        self._begun = max(self._begun, weights.begun, weights.number)
        if weights.number > self.wanted.number and not weights.is_torn:
            self.wanted = weights  # the coordinator is new
        self._mark()

    def told(self, identity: bytes, weights: Weights) -> None:
        """A replica has these weights: another ingress of a fleet may have updated them."""
        replica = self._books.replicas.get(identity)
        if replica is not None and self._round is None:
            known = replica.weights
            if (weights.number, weights.begun) > (known.number, known.begun):  # else it is older
                self.joined(replica, weights)

    def tear(self, replica: ReplicaRecord, is_torn: bool = True) -> None:
        """A replica's weights are of two versions, or away; or they are not."""
        if is_torn != replica.weights.is_torn:
            replica.weights = replace(replica.weights, is_torn=is_torn)
            self._mark()

    def lost(self, identity: bytes) -> None:
        """A replica is lost: the round goes on with the others."""
        self._tried.discard(identity)
        self._mark()
        if (round := self._round) is not None and identity in round.taking_part:
            round.taking_part.discard(identity)
            if not round.taking_part:
                self._drop(round, "all replicas of the round are lost")

    def health(self) -> dict[str, Any]:
        """What `health` tells of the weights; nothing before the first update."""
        stale = sorted(each.name for each in self._books.replicas.values() if each.is_stale)
        told: dict[str, Any] = {"stale": stale} if stale else {}
        if self.wanted != Weights():
            told["weight_version"] = self.wanted.version
        return told

    def tick(self, now: float) -> None:
        """Drop a round whose sender is silent; bring up stale replicas."""
        self._now = now
        round = self._round
        if round is None:
            self._bring_up()
        elif now >= round.expires and round.stage != "commits":
            limit = round.begin.time_limit_s
            self._drop(round, f"it had no message for {limit:g} s (time_limit_s)")

    def _mark(self) -> None:
        for replica in self._books.replicas.values():
            theirs, was = replica.weights, replica.is_stale
            replica.is_stale = theirs.is_torn or theirs.number != self.wanted.number
            if replica.is_stale and not was:
                logger.warning(
                    "Replica %s has weights %s of update %d, and the service those of update %d: "
                    "it gets no requests until it has them.",
                    replica.name, "torn" if theirs.is_torn else repr(theirs.version),
                    theirs.number, self.wanted.number,
                )  # fmt: skip
        there = self._there().values()
        waits = not there or self._source() is not None or any(not each.is_stale for each in there)
        self.why_refused = "" if waits else "no replica has whole weights: send an update of all"

    # ---- Verbs -----------------------------------------------------------------------------------

    def do(self, asker: bytes, ask: Ask) -> dict[str, Any] | None:
        """Do a verb of `WEIGHT_VERBS`; returns its answer, or None: it comes later.

        Raises:
            ValueError: it is not allowed, or not now.
        """
        found = _VERBS[ask.what](self, ask)
        if isinstance(found, dict):
            return found

        def tell(value: dict[str, Any], failure: tuple[str, str] | None) -> None:
            self._books.tell(asker, Answer(ask.number, value, failure))

        self._go(found, tell)
        return None

    def _go(self, steps: Steps[Any], tell: Tell, question: Any = None) -> None:
        """Go on up to the next question, or tell what has come of it."""
        try:
            asked = steps.send(question)
        except StopIteration as done:
            tell(done.value, None)
        except _Failed as failed:
            kind, why = failed.args
            tell({}, (kind, why))
        else:
            self._questions.put(*asked, partial(self._go, steps, tell))

    def _info(self, ask: Ask) -> dict[str, Any]:
        read_fields(ask.fields, Fields)
        replicas = {
            replica.name: {
                "version": replica.weights.version, "number": replica.weights.number,
                "is_stale": replica.is_stale, "ranks": replica.info.ranks,
            }
            for replica in self._there().values()
        }  # fmt: skip
        round = None if self._round is None else self._round.as_dict()
        wanted = {"version": self.wanted.version, "number": self.wanted.number}
        return {**wanted, "round": round, "replicas": replicas}

    def _begin(self, ask: Ask) -> Steps[dict[str, Any]]:
        begin = read_fields(ask.fields, Begin)
        self._check_idle("begin another")
        group = begin.source.name if begin.source.kind == "group" else None
        taking_part = {
            identity
            for identity, replica in self._there().items()
            if (begin.is_whole or not replica.is_stale)
            and (group is None or group in replica.groups)
        }
        if not taking_part:
            raise ValueError(
                "no replica can take part: a partial update needs one whose other weights are the "
                "service's, and a group one that has joined it (weights_group)."
            )
        weights = Weights(self._begun + 1, begin.version)
        round, answers = yield from self._open(begin, weights, taking_part)
        return self._kept(round, {"round": round.key, "number": round.number, "replicas": answers})

    def _load(self, ask: Ask) -> Steps[dict[str, Any]]:
        load = read_fields(ask.fields, Load)
        round = self._of(load.round)
        load.check()
        round.name(load.version)
        num_bytes = load.num_bytes
        if round.unread + num_bytes > MOST_UNREAD_BYTES:
            raise ValueError(
                f"{round.unread} bytes of this round are still being loaded: wait for an answer."
            )
        round.unread += num_bytes
        if load.folder is None:
            round.folders = None
        elif round.folders is not None:
            round.folders.append(load.folder)
        answers = yield from self._tell_all(round, ask.what, ask.fields)
        round.unread -= num_bytes
        return self._kept(round, {"replicas": answers})

    def _finish(self, ask: Ask) -> Steps[dict[str, Any]]:
        finish = read_fields(ask.fields, Finish)
        round = self._of(finish.round)
        round.name(finish.version)
        yield from self._stage(round)
        stale = {name: f"{kind}: {why}" for name, (kind, why) in round.failures.items()}
        told = {"version": round.weights.version, "number": round.weights.number}
        return self._kept(round, {**told, "replicas": round.answers, "stale": stale})

    def _drop_verb(self, ask: Ask) -> dict[str, Any]:
        drop = read_fields(ask.fields, Drop)
        round = self._of(drop.round, "begins", "loads", "stages")
        self._drop(round, "it was dropped by its sender")
        return {}

    def _check(self, ask: Ask) -> Steps[dict[str, Any]]:
        read_fields(ask.fields, Fields)
        self._check_idle("compare weights")
        question = yield self._there(), ask.what, {}
        sums = [answer["checksum"] for answer in question.answers.values()]
        return _by_all(question) | {"is_equal": sums == sums[:1] * len(sums)}

    def _label(self, ask: Ask) -> Steps[dict[str, Any]]:
        version = read_fields(ask.fields, Label).version
        self._check_idle("name the weights otherwise")
        fresh = {identity for identity, each in self._there().items() if not each.is_stale}
        told = _by_all((yield fresh, ask.what, ask.fields))
        for replica in self._there().values():
            replica.weights = replace(replica.weights, version=version)
        self.wanted = replace(self.wanted, version=version)
        return told

    def _group(self, ask: Ask) -> Steps[dict[str, Any]]:
        group = read_fields(ask.fields, Group)
        self._check_idle("join or leave a group")
        first, firsts = group.rank_offset, {}
        for replica in sorted(self._there().values(), key=lambda replica: replica.name):
            firsts[replica.identity] = first
            first += replica.info.ranks
        if not group.destroy and first > group.world_size:  # slime's has other services' ranks too
            raise ValueError(
                f"world_size={group.world_size} must be {first} or more: {group.rank_offset} "
                f"before the replicas, and {first - group.rank_offset} ranks of theirs."
            )

        def fields(identity: bytes) -> Mapping[str, Any]:
            return {**ask.fields, "rank_offset": firsts[identity]}

        question = yield firsts, ask.what, fields
        for replica in self._there().values():
            replica.groups.discard(group.name)
            if not group.destroy and replica.name in question.answers:
                replica.groups.add(group.name)
        return _by_all(question)

    # ---- A round ---------------------------------------------------------------------------------

    def _open(
        self, begin: Begin, weights: Weights, taking_part: set[bytes]
    ) -> Steps[tuple[_Round, dict[str, Any]]]:
        """Begin a round on replicas; their answers."""
        self._begun += 1
        key = begin.round or secrets.token_urlsafe(24)
        round = self._round = _Round(key, self._begun, begin, weights, set(taking_part))
        fields = {**msgspec.to_builtins(begin), "number": round.number}
        answers = yield from self._tell_all(round, "weights_begin", fields)
        if not round.why:
            round.stage = "loads"
        return round, answers

    def _tell_all(
        self, round: _Round, what: str, fields: Mapping[str, Any]
    ) -> Steps[dict[str, Any]]:
        """Tell all replicas of a round something; it is dropped if one of them fails. Their
        answers."""
        round.expires = self._now + round.begin.time_limit_s
        question = yield round.taking_part, what, {**fields, "round": round.key}
        round.expires = self._now + round.begin.time_limit_s
        if question.failures:
            self._drop(round, question.failure()[1])
        return question.answers

    def _stage(self, round: _Round) -> Steps[None]:
        """Stage a round on all replicas, then commit it."""
        round.stage = "stages"
        yield from self._tell_all(round, "weights_finish", {})
        if round.why:
            return
        round.stage, why = "commits", ""
        weights = msgspec.to_builtins(round.weights)
        fields = {"round": round.key, "policy": round.begin.policy, "weights": weights}
        for wave in self._waves(round):
            if self._round is not round:
                break
            question = yield wave & round.taking_part, "weights_commit", fields
            round.answers |= question.answers
            round.failures |= question.failures
            why = question.failure()[1]
            for identity in wave & self._books.replicas.keys():
                replica = self._books.replicas[identity]
                if replica.name in question.answers:
                    replica.weights = replace(round.weights, begun=round.number)
                    replica.prefix.clear()
        if not round.answers:
            self._drop(round, why or "all its replicas are lost")
        elif self._round is round:
            self._end(round)

    def _waves(self, round: _Round) -> list[set[bytes]]:
        """Replicas that commit together; those that share experts at one step of them all."""
        if round.begin.way == "together":
            return [round.taking_part]
        replicas = self._books.replicas
        sharing = {each for each in round.taking_part if replicas[each].info.shares_experts}
        alone = sorted(round.taking_part - sharing, key=lambda each: replicas[each].name)
        return [sharing] * bool(sharing) + [{each} for each in alone]

    def _end(self, round: _Round) -> None:
        """The service has the weights of a round."""
        self._round = None
        if round.weights.number > self.wanted.number:
            self.wanted = round.weights
            self._tried.clear()
            is_source = bool(round.folders) and round.begin.is_whole
            self._folders = round if is_source else None
            logger.info(
                "Weights %r (update %d) serve on %s.",
                round.weights.version, round.weights.number, ", ".join(sorted(round.answers)),
            )  # fmt: skip
        self._mark()

    def _drop(self, round: _Round, why: str) -> None:
        """The weights before serve on, unless there was no second memory for the new ones."""
        if self._round is not round:
            return
        self._round, round.why = None, why
        logger.warning("Update %d of the weights is dropped: %s.", round.number, why.rstrip("."))

        def dropped(question: Question) -> None:
            for replica in self._books.replicas.values():
                if replica.name in question.answers:
                    self.tear(replica, bool(question.answers[replica.name].get("is_torn")))

        if round.begin.staging == "none":  # until they say otherwise
            for identity in round.taking_part:
                self.tear(self._books.replicas[identity])
        self._questions.put(round.taking_part, "weights_drop", {"round": round.key}, dropped)

    def _bring_up(self) -> None:
        """Give stale replicas the weights of the last folders. Those that share experts are waited
        for: they commit together."""
        source = self._source()
        if source is None:
            return
        stale = {
            identity
            for identity, replica in self._there().items()
            if replica.is_stale and identity not in self._tried
        }
        sharing = [self._books.replicas[each].info.sharers for each in stale]
        if not stale or any(len(stale) % sharers for sharers in sharing):
            return
        self._tried |= stale
        names = ", ".join(sorted(self._books.replicas[each].name for each in stale))
        logger.info("Replicas %s get the weights %r.", names, self.wanted.version)
        self._go(self._bring(source, stale), lambda value, failure: None)

    def _bring(self, source: _Round, stale: set[bytes]) -> Steps[None]:
        begin = replace(source.begin, round=None, policy="keep", way="together")
        round, _ = yield from self._open(begin, self.wanted, stale)
        round.folders = source.folders
        for folder in source.folders or ():
            if round.why:
                return
            yield from self._tell_all(round, "weights_load", {"folder": folder})
        if not round.why:
            yield from self._stage(round)

    def _source(self) -> _Round | None:
        """Round of folders with the service's weights, if there is one."""
        found = self._folders
        return found if found and found.weights.number == self.wanted.number else None

    # ---- Small things ----------------------------------------------------------------------------

    def _there(self) -> dict[bytes, ReplicaRecord]:
        replicas = self._books.replicas
        # Those that help are needed too: experts are replaced at one step of them all.
        return {
            key: each
            for key, each in replicas.items()
            if not each.state.is_departing or each.info.shares_experts
        }

    def _check_idle(self, what: str) -> None:
        if self._round is not None:
            raise ValueError(
                f"an update of the weights is under way (number {self._round.number}): finish or "
                f"drop it before you {what}."
            )

    def _of(self, key: str, *stages: str) -> _Round:
        """The open round, if this is its key, and it is in one of these stages ("loads")."""
        round = self._round
        if round is None or not hmac.compare_digest(key.encode(), round.key.encode()):
            raise ValueError(
                "no update with this round's key is open: it has ended, was dropped, or never was."
            )
        if round.stage not in (stages or ("loads",)):
            raise ValueError(f"the round {round.stage} already: this verb comes too late or early.")
        return round

    def _kept(self, round: _Round, value: dict[str, Any]) -> dict[str, Any]:
        """The value, unless the round was dropped."""
        if round.why:
            raise _Failed("UpdateError", f"the update was dropped: {round.why}")
        return value


def _by_all(question: Question) -> dict[str, Any]:
    """What replicas told, if none of them has failed."""
    if question.failures:
        raise _Failed(*question.failure())
    return {"replicas": question.answers}


_VERBS: dict[str, Callable[[WeightRounds, Ask], dict[str, Any] | Steps[dict[str, Any]]]] = {
    "weights_info": WeightRounds._info,
    "weights_begin": WeightRounds._begin,
    "weights_load": WeightRounds._load,
    "weights_finish": WeightRounds._finish,
    "weights_drop": WeightRounds._drop_verb,
    "weights_check": WeightRounds._check,
    "weights_label": WeightRounds._label,
    "weights_group": WeightRounds._group,
}
WEIGHT_VERBS = tuple(_VERBS)
