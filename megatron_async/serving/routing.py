"""Which replica serves a request: pure decisions, no sockets and no clock.

By default (`RoutingPolicy`), a request whose prompt begins like prompts that a replica has served
lately goes there, where the blocks may still be in its cache, unless that replica is much more
loaded than another. Otherwise the replica with the fewest unfinished tokens takes it. The other
policies of `POLICIES` do not look at prompts.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_async.errors import ConfigurationError
from megatron_async.planning.prefix_hashes import DIGEST_BYTES, block_hashes

BYTES_PER_TOKEN = 4
"""Assumed bytes of a text for each token: the coordinator has no tokenizer."""
MOST_PREFIX_BLOCKS = 1024
"""Most blocks at the beginning of a prompt that are compared. With the engine's 256 tokens a block
this is longer than any context; with 16, longer than the long prompts that agents share."""


@dataclass(frozen=True)
class Candidate:
    """A replica that accepts requests, as a policy sees it.

    Attributes:
        unfinished_tokens: tokens that its requests may still need; estimates for the newest ones.
        free_blocks: free KV blocks, less those that the newest requests will take.
        prefix: blocks of prompts that it has served.
    """

    name: str
    unfinished_tokens: int
    free_blocks: int
    unfinished_requests: int
    prefix: PrefixTable


@dataclass(frozen=True)
class RoutingPolicy:
    """Shared prefix first, then load.

    Attributes:
        slack_tokens: a replica may have so many more unfinished tokens than the least loaded one,
            and still get a request for its prefix.
        slack_ratio: this limit as a share of the least load; the larger of the two counts.
    """

    slack_tokens: int = 4096
    slack_ratio: float = 0.25

    def choose(
        self, candidates: Sequence[Candidate], prompt: Sequence[bytes], blocks: int
    ) -> tuple[Candidate, int]:
        """The replica for a request.

        Args:
            candidates: not empty.
            prompt: hashes of the blocks that its prompt begins with; see `prompt_hashes`.
            blocks: KV blocks that the request may take.

        Returns:
            the replica, and how many blocks of the prompt it has served before.
        """

        def load(candidate: Candidate) -> tuple[bool, int, int]:
            return load_of(candidate, blocks)

        least = min(candidates, key=load)
        allowed = least.unfinished_tokens + max(
            self.slack_tokens, self.slack_ratio * least.unfinished_tokens
        )
        matches = [(candidate.prefix.match(prompt), candidate) for candidate in candidates]
        near = [
            (match, candidate)
            for match, candidate in matches
            if match and candidate.unfinished_tokens <= allowed
        ]
        if near:
            longest = max(match for match, _ in near)
            best = min((c for match, c in near if match == longest), key=load)
            return best, longest
        return least, next(match for match, candidate in matches if candidate is least)


@dataclass(frozen=True)
class LeastLoaded(RoutingPolicy):
    """Load alone: the replica with the fewest unfinished tokens of those where the request fits."""

    def choose(
        self, candidates: Sequence[Candidate], prompt: Sequence[bytes], blocks: int
    ) -> tuple[Candidate, int]:
        """Choose the replica for a request; arguments as for `RoutingPolicy.choose`."""
        least = min(candidates, key=lambda candidate: load_of(candidate, blocks))
        return least, least.prefix.match(prompt)


@dataclass(frozen=True)
class RoundRobin(RoutingPolicy):
    """In turn: the replica whose last request is the longest ago, whatever its load. An object of
    this policy serves one coordinator."""

    _turns: dict[str, int] = field(default_factory=dict)

    def choose(
        self, candidates: Sequence[Candidate], prompt: Sequence[bytes], blocks: int
    ) -> tuple[Candidate, int]:
        """Choose the replica for a request; arguments as for `RoutingPolicy.choose`."""
        chosen = min(candidates, key=lambda candidate: self._turns.get(candidate.name, -1))
        self._turns[chosen.name] = max(self._turns.values(), default=-1) + 1
        return chosen, chosen.prefix.match(prompt)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "prefix": RoutingPolicy,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
"""By the names that users type."""


def make_policy(name: str) -> RoutingPolicy:
    """A policy by its name.

    Raises:
        ConfigurationError: there is none of this name.
    """
    if name not in POLICIES:
        raise ConfigurationError(f"--policy {name} is unknown: use {', '.join(POLICIES)}.")
    return POLICIES[name]()


def load_of(candidate: Candidate, blocks: int) -> tuple[bool, int, int]:
    """Load of a replica, for comparison: first whether `blocks` more do not fit its pool."""
    return (
        candidate.free_blocks < blocks,
        candidate.unfinished_tokens,
        candidate.unfinished_requests,
    )


class PrefixTable:
    """Blocks that prompts began with, the latest ones: as many as the replica's pool has, since no
    cache holds more."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, 1)
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def clear(self) -> None:
        """Forget all blocks."""
        self._hashes.clear()

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks are remembered, in a row."""
        # A block is never forgotten before those behind it, so the remembered ones come first. (A
        # replica's cache too loses a sequence from its end on.)
        return bisect_left(hashes, True, key=lambda each: each not in self._hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        """Remember a prompt's blocks, and forget the oldest beyond the capacity."""
        # Its last block first: a chain is of use only from its beginning, which goes last.
        for each in reversed(hashes):
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)

    def remove(self, hashes: Sequence[bytes]) -> None:
        """Forget blocks that the replica's cache has lost."""
        for each in hashes:
            self._hashes.pop(each, None)


def prompt_hashes(prompt: str | Sequence[int], block_size_tokens: int) -> list[bytes]:
    """A hash of each of the first `MOST_PREFIX_BLOCKS` full blocks of a prompt.

    For token ids, blocks and hashes are those of the engine's prefix cache (`block_hashes`). Only
    replicas know the tokens of a text, so its blocks are estimates: `BYTES_PER_TOKEN` bytes count
    as a token. A text and its token ids have no hash in common. Each has 16 bytes; there are none
    if an id is no int32 (a replica then refuses the request)."""
    if isinstance(prompt, str):
        return _text_hashes(prompt.encode(errors="replace"), block_size_tokens * BYTES_PER_TOKEN)
    try:
        tokens = np.array(prompt[: MOST_PREFIX_BLOCKS * block_size_tokens], dtype=np.int32)
    except OverflowError:
        return []
    return block_hashes(tokens, block_size_tokens)


def _text_hashes(data: bytes, size: int) -> list[bytes]:
    found: list[bytes] = []
    for start in range(0, min(len(data) // size, MOST_PREFIX_BLOCKS) * size, size):
        block = (found[-1] if found else b"text") + data[start : start + size]
        found.append(hashlib.blake2b(block, digest_size=DIGEST_BYTES).digest())
    return found


def prompt_length(prompt: str | Sequence[int]) -> int:
    """Tokens of a prompt; for a text, an estimate."""
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace")) // BYTES_PER_TOKEN + 1
    return len(prompt)
