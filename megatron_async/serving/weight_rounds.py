"""`WeightRounds`: updates of a service's weights, as a coordinator decides on them.

A round is begun on all replicas, gets its tensors, is staged on all of them, and only then is
committed. Until that the weights before serve on. A replica with other weights than the service's
is *stale* and gets no requests. No sockets and no clock: `tick` passes the time.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from megatron_async.serving.messages import Answer, Ask, Version, Weights
from megatron_async.serving.questions import Question, Questions, Then
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

Extra = Callable[[Question], dict[str, Any]]
MOST_UNREAD_BYTES = 4 * (64 << 20)
"""Most bytes of tensors that replicas have not answered for: a further message is refused."""


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
        return _VERBS[ask.what](self, asker, ask)

    def _info(self, asker: bytes, ask: Ask) -> dict[str, Any]:
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

    def _begin(self, asker: bytes, ask: Ask) -> None:
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

        round: _Round

        def begun(question: Question) -> None:
            value = {"round": round.key, "number": round.number, "replicas": question.answers}
            self._answer(asker, ask, round, value)

        weights = Weights(self._begun + 1, begin.version)
        round = self._open(begin, weights, taking_part, begun)

    def _load(self, asker: bytes, ask: Ask) -> None:
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

        def loaded(question: Question) -> None:
            round.unread -= num_bytes
            self._answer(asker, ask, round, {"replicas": question.answers})

        self._put(round, ask.what, ask.fields, loaded)

    def _finish(self, asker: bytes, ask: Ask) -> None:
        finish = read_fields(ask.fields, Finish)
        round = self._of(finish.round)
        round.name(finish.version)

        def over(question: Question) -> None:
            stale = {name: f"{kind}: {why}" for name, (kind, why) in round.failures.items()}
            told = {"version": round.weights.version, "number": round.weights.number}
            value = {**told, "replicas": round.answers, "stale": stale}
            self._answer(asker, ask, round, value)

        self._stage(round, over)

    def _drop_verb(self, asker: bytes, ask: Ask) -> dict[str, Any]:
        drop = read_fields(ask.fields, Drop)
        round = self._of(drop.round, "begins", "loads", "stages")
        self._drop(round, "it was dropped by its sender")
        return {}

    def _check(self, asker: bytes, ask: Ask) -> None:
        read_fields(ask.fields, Fields)
        self._check_idle("compare weights")

        def checked(question: Question) -> dict[str, Any]:
            sums = [answer["checksum"] for answer in question.answers.values()]
            return {"is_equal": sums == sums[:1] * len(sums)}

        self._ask(asker, ask, self._there(), {}, checked)

    def _label(self, asker: bytes, ask: Ask) -> None:
        version = read_fields(ask.fields, Label).version
        self._check_idle("name the weights otherwise")

        def labelled(question: Question) -> dict[str, Any]:
            if not question.failures:
                for replica in self._there().values():
                    replica.weights = replace(replica.weights, version=version)
                self.wanted = replace(self.wanted, version=version)
            return {}

        fresh = {identity for identity, each in self._there().items() if not each.is_stale}
        self._ask(asker, ask, fresh, ask.fields, labelled)

    def _group(self, asker: bytes, ask: Ask) -> None:
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

        def done(question: Question) -> dict[str, Any]:
            for replica in self._there().values():
                replica.groups.discard(group.name)
                if not group.destroy and replica.name in question.answers:
                    replica.groups.add(group.name)
            return {}

        def fields(identity: bytes) -> Mapping[str, Any]:
            return {**ask.fields, "rank_offset": firsts[identity]}

        self._ask(asker, ask, firsts, fields, done)

    def _ask(
        self, asker: bytes, ask: Ask, replicas: Iterable[bytes], fields: Any, then: Extra
    ) -> None:
        """Ask replicas beside a round; `then` gives the answer what theirs do not tell."""

        def answered(question: Question) -> None:
            told = {"replicas": question.answers, **then(question)}
            self._tell(asker, ask, told, question.failure() if question.failures else None)

        self._questions.put(replicas, ask.what, fields, answered)

    # ---- A round ---------------------------------------------------------------------------------

    def _open(self, begin: Begin, weights: Weights, taking_part: set[bytes], then: Then) -> _Round:
        self._begun += 1
        key = begin.round or secrets.token_urlsafe(24)
        round = self._round = _Round(key, self._begun, begin, weights, set(taking_part))

        def begun(question: Question) -> None:
            if not round.why:
                round.stage = "loads"
            then(question)

        fields = {**msgspec.to_builtins(begin), "number": round.number}
        self._put(round, "weights_begin", fields, begun)
        return round

    def _put(self, round: _Round, what: str, fields: Mapping[str, Any], then: Then) -> None:
        """Tell all replicas of a round something; it is dropped if one of them fails."""

        def answered(question: Question) -> None:
            round.expires = self._now + round.begin.time_limit_s
            if question.failures:
                self._drop(round, question.failure()[1])
            then(question)

        round.expires = self._now + round.begin.time_limit_s
        told = {**fields, "round": round.key}
        self._questions.put(round.taking_part, what, told, answered)

    def _stage(self, round: _Round, then: Then) -> None:
        """Stage a round on all replicas, then commit it; `then` at its end."""
        round.stage = "stages"

        def staged(question: Question) -> None:
            if round.why:
                then(question)
            else:
                round.stage = "commits"
                self._commit(round, self._waves(round), then)

        self._put(round, "weights_finish", {}, staged)

    def _waves(self, round: _Round) -> list[set[bytes]]:
        """Replicas that commit together; those that share experts at one step of them all."""
        if round.begin.way == "together":
            return [round.taking_part]
        replicas = self._books.replicas
        sharing = {each for each in round.taking_part if replicas[each].info.shares_experts}
        alone = sorted(round.taking_part - sharing, key=lambda each: replicas[each].name)
        return [sharing] * bool(sharing) + [{each} for each in alone]

    def _commit(self, round: _Round, waves: list[set[bytes]], then: Then) -> None:
        wave = waves.pop(0) & round.taking_part
        weights = msgspec.to_builtins(round.weights)

        def committed(question: Question) -> None:
            round.answers |= question.answers
            round.failures |= question.failures
            for identity in wave & self._books.replicas.keys():
                replica = self._books.replicas[identity]
                if replica.name in question.answers:
                    replica.weights = replace(round.weights, begun=round.number)
                    replica.prefix.clear()
            if waves and self._round is round:
                self._commit(round, waves, then)
                return
            if not round.answers:
                self._drop(round, question.failure()[1] or "all its replicas are lost")
            elif self._round is round:
                self._end(round)
            then(question)

        fields = {"round": round.key, "policy": round.begin.policy, "weights": weights}
        self._questions.put(wave, "weights_commit", fields, committed)

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
        round: _Round
        left = list(source.folders or ())

        def go_on(question: Question) -> None:
            if round.why:
                return
            if left:
                self._put(round, "weights_load", {"folder": left.pop(0)}, go_on)
            else:
                self._stage(round, lambda _: None)

        begin = replace(source.begin, round=None, policy="keep", way="together")
        round = self._open(begin, self.wanted, stale, go_on)
        round.folders = source.folders
        names = ", ".join(sorted(self._books.replicas[each].name for each in stale))
        logger.info("Replicas %s get the weights %r.", names, self.wanted.version)

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

    def _answer(self, asker: bytes, ask: Ask, round: _Round, value: dict[str, Any]) -> None:
        why = ("UpdateError", f"the update was dropped: {round.why}") if round.why else None
        self._tell(asker, ask, value, why)

    def _tell(
        self, asker: bytes, ask: Ask, value: dict[str, Any], failure: tuple[str, str] | None
    ) -> None:
        self._books.tell(asker, Answer(ask.number, {} if failure else value, failure))


_VERBS: dict[str, Callable[[WeightRounds, bytes, Ask], dict[str, Any] | None]] = {
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
