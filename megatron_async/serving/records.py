"""A coordinator's records of its replicas, its clients and their requests."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from megatron_async.device_state.cache_layout import BlockNeeds
from megatron_async.errors import ConfigurationError
from megatron_async.serving.messages import Generate, ReplicaInfo, ReplicaStatus, Run, Weights
from megatron_async.serving.routing import (
    Candidate,
    PrefixTable,
    RoutingPolicy,
    prompt_hashes,
    prompt_length,
)
from megatron_async.serving.token_routes import TokenRoutes

UNLIMITED_TOKENS = 256
"""Tokens: the assumed length of an answer without a limit, for estimates of load."""
MOST_TOKENS = 2**20
"""Tokens: a larger limit counts as this number, because only replicas know the model's limit."""
MOST_SILENCE_S = 86_400
"""A silence in milliseconds is an int32 of the kernel's."""
MOST_EARLY_DEATHS = 1
"""A request is not served again when more replicas than this have died before its first token."""


@dataclass(frozen=True)
class CoordinatorConfig:
    """Settings of a coordinator.

    Attributes:
        on_replica_death: "retry": another replica serves its requests from their beginnings, with
            the same random numbers. "fail": they fail.
        max_retries: times that a request is served again; at most once if its replica died before
            the request's first token, because the request may be the cause.
        max_unfinished: requests in the coordinator, queued or served; further ones are refused.
        max_tokens_in_flight: most tokens of all unfinished requests, prompts and answers together,
            by their limits (an answer without a limit counts as `UNLIMITED_TOKENS`). A request that
            exceeds this is refused, unless it is the only one. None: no limit.
        max_unfinished_of_owner, max_tokens_of_owner: the same limits for the requests of one named
            owner.
        requests_per_slot: a replica gets at most this many requests for each of its slots; further
            requests wait in the coordinator.
        ping_interval_s: seconds between two pings to all peers.
        silence_s: seconds without an answer after which a replica is lost.
        stall_s: seconds without a finished step after which a replica with work is lost.
        client_silence_s: seconds without an answer after which a client's requests are aborted.
        no_replica_timeout_s: seconds without a replica after which queued requests fail.
        policy: chooses the replica for a request.
    """

    on_replica_death: str = "retry"
    max_retries: int = 2
    max_unfinished: int = 4096
    max_tokens_in_flight: int | None = None
    max_unfinished_of_owner: int | None = None
    max_tokens_of_owner: int | None = None
    requests_per_slot: float = 2.0
    ping_interval_s: float = 0.5
    silence_s: float = 8.0
    stall_s: float = 60.0
    client_silence_s: float = 30.0
    no_replica_timeout_s: float = 30.0
    policy: RoutingPolicy = field(default_factory=RoutingPolicy)

    def __post_init__(self) -> None:
        if self.on_replica_death not in ("retry", "fail"):
            raise ConfigurationError(
                f"on_replica_death={self.on_replica_death!r} must be 'retry' or 'fail'."
            )
        if self.max_retries < 0:
            raise ConfigurationError(f"max_retries={self.max_retries} must be 0 or more.")
        for name in (
            "max_unfinished", "requests_per_slot", "ping_interval_s", "silence_s", "stall_s",
            "client_silence_s", "no_replica_timeout_s",
        ):  # fmt: skip
            if not 0 < (value := getattr(self, name)) < math.inf:  # nan is neither
                raise ConfigurationError(f"{name}={value} must be more than 0, and finite.")
        for name in ("max_tokens_in_flight", "max_unfinished_of_owner", "max_tokens_of_owner"):
            most = getattr(self, name)
            if most is not None and most <= 0:
                raise ConfigurationError(f"{name}={most} must be more than 0, or None.")
        for name in ("silence_s", "stall_s", "client_silence_s"):
            if getattr(self, name) < 2 * self.ping_interval_s:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)} must be twice ping_interval_s="
                    f"{self.ping_interval_s} or more: a healthy peer is heard only at each ping."
                )
        if self.silence_s > MOST_SILENCE_S:
            raise ConfigurationError(
                f"silence_s={self.silence_s} must be at most {MOST_SILENCE_S}, a day."
            )


class ReplicaState(StrEnum):
    """State of a replica."""

    READY = "ready"
    DRAINING = "draining"
    """Finishes its requests and gets no new ones."""
    PAUSED = "paused"
    """The engine runs no steps; requests wait."""
    LEAVING = "leaving"
    """Finishes its requests and ends."""
    HELPING = "helping"
    """Has left, but still steps because other replicas of its job need its experts."""

    @property
    def is_departing(self) -> bool:
        """Whether it will serve no further request."""
        return self in (ReplicaState.LEAVING, ReplicaState.HELPING)


def tokens_of(asked: Generate) -> int:
    """Estimate of the most tokens of a request: prompt and answer."""
    limit = asked.max_new_tokens
    new = UNLIMITED_TOKENS if limit is None else min(max(limit, 0), MOST_TOKENS)
    return prompt_length(asked.prompt) + new


@dataclass(eq=False)
class RoutedRequest:
    """An unfinished request.

    Attributes:
        number: the coordinator's; replicas' engines use it as their request id.
        replica: the replica that serves it; None while it is queued.
        attempts: replicas that it was given to, but for those that it left.
        early_deaths: how many of them died before its first token.
        is_aborted: whether its client has aborted it.
        received_at: when it arrived, seconds.
        given_at: when the replica that serves it got it, seconds; 0.0: no replica has.
        moved: what it has from a replica that it left, behind which it goes on; {}: it begins.
        left: the replica that it left, and which it is not given again if there is another.
    """

    number: int
    client: bytes
    asked: Generate
    routes: TokenRoutes
    received_at: float = 0.0
    given_at: float = 0.0
    replica: ReplicaRecord | None = None
    attempts: int = 0
    early_deaths: int = 0
    is_aborted: bool = False
    moved: dict[str, Any] = field(default_factory=dict)
    left: ReplicaRecord | None = None

    @property
    def wait_s(self) -> float:
        """Seconds from its arrival until a replica got it; 0 if none did."""
        return max(self.given_at - self.received_at, 0.0)

    @property
    def has_started(self) -> bool:
        """Whether the replica that serves it has sent a token of it."""
        return self.routes.has_started(self.number)

    @property
    def order(self) -> tuple[int, int]:
        """Place in the queue; a request that is served again keeps its place."""
        return -self.asked.priority, self.number

    @cached_property
    def tokens(self) -> int:
        """Tokens that the request can come to, as limits count them (`tokens_of`)."""
        return tokens_of(self.asked)

    @property
    def is_suspect(self) -> bool:
        """Whether the request may have caused the death of a replica."""
        return self.early_deaths > 0 and not self.has_started

    def may_be_served_again(self, config: CoordinatorConfig) -> bool:
        """Whether another replica serves it, now that its replica has died."""
        self.early_deaths += not self.has_started
        most = config.max_retries if config.on_replica_death == "retry" else 0
        return self.early_deaths <= MOST_EARLY_DEATHS and self.attempts <= most

    def run(self) -> Run:
        """The message to its replica."""
        asked = self.asked
        return Run(
            self.number, asked.prompt, asked.params, asked.priority, asked.traceparent,
            asked.label, self.moved,
        )  # fmt: skip

    def give_to(self, replica: ReplicaRecord | None) -> None:
        """Another replica serves it, from its beginning or behind `moved`; None: it is queued
        again."""
        self.replica = replica
        self.attempts += replica is not None
        self.routes.give(self.number, None if replica is None else replica.index)


class UnseenRun(NamedTuple):
    """A run that a replica's status does not count yet."""

    number: int
    """Number of the run, from 1."""
    tokens: int
    """Tokens that may have to be computed."""
    blocks: int
    """KV blocks that it may take."""
    hashes: Sequence[bytes]
    """Hashes of the prompt's blocks."""


class ReplicaRecord:
    """A replica that has joined.

    Attributes:
        last_progress: time when its engine last finished a step or had no work, seconds.
        completed: requests that it ended without an error.
        weights: that it has.
        is_stale: they are not the service's, so it gets no requests.
        groups: names of the trainers' process groups that it has joined.
    """

    def __init__(self, identity: bytes, info: ReplicaInfo, now: float, index: int) -> None:
        self.identity = identity
        self.index = index
        self.info = info
        self.state = ReplicaState.READY
        self.status: ReplicaStatus | None = None
        self.requests: dict[int, RoutedRequest] = {}
        self.last_heard = self.last_progress = now
        self.completed = 0
        self.weights, self.is_stale = Weights(), False
        self.groups: set[str] = set()
        self.prefix = PrefixTable(info.kv_blocks)
        self._needs = BlockNeeds(info.windows, max(info.block_size_tokens, 1))
        self._runs = 0
        self._unseen: deque[UnseenRun] = deque()
        # Sums over them: the policy asks for each request, and in a burst there are many.
        self._unseen_tokens = self._unseen_blocks = 0

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.info.name

    @property
    def may_serve(self) -> bool:
        """Whether it serves further requests, now or later."""
        return not (self.state.is_departing or self.is_stale)

    @property
    def shown_state(self) -> str:
        """State as people see it."""
        return "stale" if self.is_stale and self.state == ReplicaState.READY else str(self.state)

    def why_lost(self, now: float, config: CoordinatorConfig) -> str:
        """Why it counts as lost, "" if it does not."""
        silent, stalled = now - self.last_heard, now - self.last_progress
        if silent >= config.silence_s:
            return f"it has not answered for {silent:.1f} s"
        if stalled >= config.stall_s and self.state != ReplicaState.PAUSED:
            return f"its engine has work and has not finished a step for {stalled:.0f} s"
        return ""

    @property
    def has_suspect(self) -> bool:
        """Whether it has a suspect: a request that may kill it."""
        return any(request.is_suspect for request in self.requests.values())

    def blocks_of(self, request: RoutedRequest) -> int:
        """KV blocks that a request may take here."""
        return self._needs.of(-(-request.tokens // self.info.block_size_tokens))

    def hashes_of(self, request: RoutedRequest) -> list[bytes]:
        """Hashes of the blocks that its prompt begins with."""
        return prompt_hashes(request.asked.prompt, self.info.block_size_tokens)

    def given(self, request: RoutedRequest, hashes: Sequence[bytes], match: int) -> None:
        """Count a request that the replica was sent; `hashes` are its prompt's blocks, of which it
        has served the first `match` before."""
        self.requests[request.number] = request
        self._runs += 1
        tokens = max(request.tokens - match * self.info.block_size_tokens, 0)
        run = UnseenRun(self._runs, tokens, self.blocks_of(request), hashes)
        self._unseen.append(run)
        self._unseen_tokens += run.tokens
        self._unseen_blocks += run.blocks
        self.prefix.add(hashes)

    def heard(self, status: ReplicaStatus, now: float) -> None:
        """Take in the status that the replica has sent."""
        before = self.status
        self.status = status
        idle = not status.unfinished_tokens or status.is_stopped
        if before is None or idle or status.resolved_steps != before.resolved_steps:
            self.last_progress = now
        while self._unseen and self._unseen[0].number <= status.runs_seen:
            run = self._unseen.popleft()
            self._unseen_tokens -= run.tokens
            self._unseen_blocks -= run.blocks
        self.prefix.remove(status.lost_blocks)
        for run in self._unseen:  # it will compute these again
            self.prefix.add(run.hashes)

    def candidate(self) -> Candidate:
        """What the policy looks at."""
        tokens, free = self._unseen_tokens, self.info.kv_blocks
        if self.status is not None:
            tokens += self.status.unfinished_tokens
            free = self.status.free_blocks
        free -= self._unseen_blocks
        return Candidate(self.name, tokens, free, len(self.requests), self.prefix)

    def as_dict(self) -> dict[str, object]:
        """For `stats`."""
        load = self.candidate()
        return {
            "state": self.shown_state,
            "unfinished_requests": len(self.requests),
            "unfinished_tokens": load.unfinished_tokens,
            "free_blocks": load.free_blocks,
            "completed_requests": self.completed,
            "prefix_blocks": len(self.prefix),
            "info": msgspec.to_builtins(self.info),
            "engine": {} if self.status is None else self.status.engine,
        }


@dataclass(eq=False)
class ClientRecord:
    """A client."""

    identity: bytes
    last_heard: float
    index: int
    requests: dict[int, RoutedRequest] = field(default_factory=dict)
