"""`SessionTrace`: made-up traces of users and agents that come back with all they said before.

Sessions are a tree: many share a prompt of the system's; each then goes its own way. The prompt of
a turn is the prompt of the turn before, its answer, and new tokens. Since tokens follow from ids
(`tokens_of`), which answers have too, a simulated engine that samples the trace's tokens says
exactly what the next prompt repeats.

What is approximated: when a turn arrives is part of the trace, as in a file, and not of the
simulation. It is the arrival of the turn before plus a time that its answer takes at a fixed pace
plus a time to think, so users of an engine that is slower than that do not wait for their answers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import LengthDistribution
from megatron_async.lab.fleets.traced_requests import PIECE_TOKENS, TracedRequest, pieces_of

FIRST_TOKEN_S = 0.5
TOKEN_S = 0.02
"""The pace that turns of a session count with: seconds to the first token, and for each token."""


@dataclass(frozen=True)
class SessionKind:
    """What sessions are like.

    Raises:
        ConfigurationError: a field that no session can have.
    """

    shared_tokens: int
    """Tokens of a prompt that sessions share; a multiple of 512, the tokens of an id."""
    num_shared: int
    """Different shared prompts; the n-th is chosen 1 / n times as often as the first (Zipf)."""
    turns: LengthDistribution
    """Requests of a session."""
    first_tokens: LengthDistribution
    """New tokens of the first turn, behind the shared prompt."""
    new_tokens: LengthDistribution
    """New tokens of each later turn."""
    output_tokens: LengthDistribution
    """Tokens of an answer."""
    think_s: float
    """Mean time between an answer and the next turn, seconds; exponential."""
    longest: int
    """A session ends before a turn whose prompt and answer would have more tokens than this."""

    def __post_init__(self) -> None:
        if self.shared_tokens < 0 or self.shared_tokens % PIECE_TOKENS:
            raise ConfigurationError(
                f"shared_tokens={self.shared_tokens} must be a multiple of {PIECE_TOKENS}: the "
                "trace's ids stand for so many tokens each."
            )
        if self.num_shared < 1:
            raise ConfigurationError(f"num_shared={self.num_shared} must be at least 1.")
        if not 0 <= self.think_s < np.inf:
            raise ConfigurationError(f"think_s={self.think_s!r} must be seconds of at least 0.")
        least = self.shared_tokens + self.first_tokens.longest + self.output_tokens.longest
        if self.longest < least:
            raise ConfigurationError(
                f"longest={self.longest} must be at least {least}: the shared prompt, and the "
                "longest first turn and answer."
            )


KINDS: dict[str, SessionKind] = {
    "chats": SessionKind(
        shared_tokens=1024,
        num_shared=8,
        turns=LengthDistribution(5.0, 40),
        first_tokens=LengthDistribution(256.0, 4096, 1.0),
        new_tokens=LengthDistribution(128.0, 2048, 1.0),
        output_tokens=LengthDistribution(256.0, 1024),
        think_s=30.0,
        longest=16_384,
    ),
    "agents": SessionKind(
        shared_tokens=12_288,
        num_shared=4,
        turns=LengthDistribution(30.0, 100, 0.4),
        first_tokens=LengthDistribution(1024.0, 4096),
        new_tokens=LengthDistribution(700.0, 4096, 1.0),
        output_tokens=LengthDistribution(200.0, 1024, 0.8),
        think_s=2.0,
        longest=65_536,
    ),
}
"""By name. "chats": users who talk with one of a few assistants. "agents": programs that work with
tools, whose descriptions they share, step by step on a context that grows; input tokens to output
tokens are about 130 to 1, as is reported of traces of coding agents (131:1). The other numbers are
chosen, not measured."""


@dataclass
class _Session:
    """One session on its way."""

    random: np.random.Generator
    shared: int
    """Number of its shared prompt."""
    turns: int
    length: int
    """Tokens so far, answers included."""
    ids: list[int] = field(default_factory=list)


class SessionTrace:
    """Sessions that begin at random times, as one trace. Traces of one seed have the same sessions
    at every rate, closer together or further apart.

    Args:
        kind: of the sessions.
        rate: requests a second, once as many sessions end as begin; it rises to that.
        num_requests: the trace ends behind so many.
        seed: of everything.

    Raises:
        ConfigurationError: a rate that is not above 0, or no requests.
    """

    def __init__(self, kind: SessionKind, rate: float, num_requests: int, seed: int = 0) -> None:
        if not 0 < rate < np.inf or num_requests < 1:
            raise ConfigurationError(
                f"rate={rate!r} requests/s and num_requests={num_requests!r} must both be above 0."
            )
        self._kind, self._rate = kind, rate
        self._num_requests, self._seed = num_requests, seed

    def __iter__(self) -> Iterator[TracedRequest]:
        return _Run(self._kind, self._rate, self._seed).requests(self._num_requests)


class _Run:
    """One reading of a trace."""

    def __init__(self, kind: SessionKind, rate: float, seed: int) -> None:
        self._kind, self._seed = kind, seed
        self._session_rate = rate / kind.turns.mean
        self._starts = np.random.default_rng((seed, 0))
        self._new_id = count()
        self._shared_ids: dict[int, list[int]] = {}
        popularity = 1.0 / np.arange(1, kind.num_shared + 1)
        self._popularity = popularity / popularity.sum()

    def requests(self, num_requests: int) -> Iterator[TracedRequest]:
        """The trace."""
        due: list[tuple[float, int, _Session]] = []
        starts, numbers = 0.0, count()
        for _ in range(num_requests):
            # A session is made once it is needed: the next one begins before all turns that wait.
            while not due or starts <= due[0][0]:
                number = next(numbers)
                heapq.heappush(due, (starts, number, self._begin(number)))
                starts += self._starts.exponential() / self._session_rate
            arrival, number, session = heapq.heappop(due)
            request, follows_s = self._turn(arrival, session)
            yield request
            if follows_s is not None:
                heapq.heappush(due, (arrival + follows_s, number, session))

    def _begin(self, number: int) -> _Session:
        kind, random = self._kind, np.random.default_rng((self._seed, 1, number))
        shared = int(random.choice(kind.num_shared, p=self._popularity))
        length = kind.shared_tokens + int(kind.first_tokens.draw(1, random)[0])
        return _Session(random, shared, int(kind.turns.draw(1, random)[0]), length)

    def _turn(self, arrival: float, session: _Session) -> tuple[TracedRequest, float | None]:
        """A session's next request, and seconds until the one behind it; None: there is none."""
        kind, random = self._kind, session.random
        if not session.ids:
            session.ids += self._ids_of_shared(session.shared)
        # A turn was let in for its longest answer, see below.
        prompt, output = session.length, int(kind.output_tokens.draw(1, random)[0])
        session.length += output
        missing = pieces_of(session.length) - len(session.ids)
        session.ids += (next(self._new_id) for _ in range(missing))
        request = TracedRequest(arrival, prompt, output, np.array(session.ids, dtype=np.int64))
        session.turns -= 1
        session.length += int(kind.new_tokens.draw(1, random)[0])
        if not session.turns or session.length + kind.output_tokens.longest > kind.longest:
            return request, None
        think_s = kind.think_s * float(random.exponential())
        return request, FIRST_TOKEN_S + TOKEN_S * output + think_s

    def _ids_of_shared(self, number: int) -> list[int]:
        if number not in self._shared_ids:
            pieces = pieces_of(self._kind.shared_tokens)
            self._shared_ids[number] = [next(self._new_id) for _ in range(pieces)]
        return self._shared_ids[number]
