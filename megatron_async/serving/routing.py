"""Which replica serves a request: pure decisions, no sockets and no clock.

A request whose prompt begins like prompts that a replica has served lately goes there, where the
blocks may still be in a cache, unless that replica is much more loaded than another. Otherwise the
replica with the fewest unfinished tokens takes it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BYTES_PER_TOKEN = 4
"""Of a text, about: the coordinator has no tokenizer, and estimates are enough."""
MOST_PREFIX_BLOCKS = 64
"""Blocks at the beginning of a prompt that are looked at."""


@dataclass(frozen=True)
class Candidate:
    """What is known of a replica that takes requests.

    Attributes:
        name: its name.
        unfinished_tokens: what its requests may still need, estimates for the newest ones.
        free_blocks: of its KV pool, less what the newest requests will take.
        unfinished_requests: that it was given.
        prefix: prompts that it has served.
    """

    name: str
    unfinished_tokens: int
    free_blocks: int
    unfinished_requests: int
    prefix: PrefixTable


@dataclass(frozen=True)
class RoutingPolicy:
    """See above.

    Attributes:
        slack_tokens: how much more than the least loaded replica one may have unfinished and still
            get a request for its prefix.
        slack_ratio: the same as a share of the least load; the larger of the two counts.
    """

    slack_tokens: int = 4096
    slack_ratio: float = 0.25

    def choose(
        self, candidates: Sequence[Candidate], prompt: Sequence[bytes], blocks: int
    ) -> tuple[Candidate, int]:
        """The replica for a request.

        Args:
            candidates: not empty.
            prompt: hashes of the blocks that its prompt begins with; see `block_hashes`.
            blocks: that it may take in all.

        Returns:
            the replica, and how many blocks of the prompt it has served before.
        """

        def load(candidate: Candidate) -> tuple[bool, int, int]:
            return (
                candidate.free_blocks < blocks,
                candidate.unfinished_tokens,
                candidate.unfinished_requests,
            )

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


class PrefixTable:
    """Blocks that prompts began with, the latest ones.

    Args:
        capacity: most blocks remembered: no cache holds more than the replica's pool.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, 1)
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks are remembered, in a row."""
        for count, each in enumerate(hashes):
            if each not in self._hashes:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        """Remember a prompt's blocks, and forget the oldest beyond the capacity."""
        # Its last block first: a chain is of use only from its beginning, which goes last.
        for each in reversed(hashes):
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)


def block_hashes(prompt: str | Sequence[int], block_size_tokens: int) -> list[bytes]:
    """A hash of each full block at a prompt's beginning that covers all blocks before it too.

    Args:
        prompt: token ids, or a text, of which `BYTES_PER_TOKEN` bytes count as a token.
        block_size_tokens: tokens in a block.
    """
    if isinstance(prompt, str):
        data, size = prompt.encode(errors="replace"), block_size_tokens * BYTES_PER_TOKEN
    else:
        try:
            data = array("q", prompt).tobytes()
        except OverflowError:  # no token of any model; a replica tells the client
            return []
        size = block_size_tokens * array("q").itemsize
    found: list[bytes] = []
    for start in range(0, min(len(data) // size, MOST_PREFIX_BLOCKS) * size, size):
        before = found[-1] if found else type(prompt).__name__.encode()
        block = before + data[start : start + size]
        found.append(hashlib.blake2b(block, digest_size=16).digest())
    return found


def prompt_length(prompt: str | Sequence[int]) -> int:
    """Tokens of a prompt; of a text, about."""
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace")) // BYTES_PER_TOKEN + 1
    return len(prompt)
