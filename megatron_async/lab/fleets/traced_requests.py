"""`TracedRequest`: a request of a trace that says which prompts begin alike, and its tokens.

A sequence is cut into pieces of `PIECE_TOKENS` tokens, each of which has an id: equal ids mean
equal pieces behind equal beginnings. So are the public traces of Mooncake made (Qin et al.,
"Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", arXiv 2407.00079; its
repository's "Trace data"). Texts are not known; tokens are made of the ids.

`hit_ceiling`: prompt tokens that a cache without limits would find, from a trace's ids alone.

No engine runs for it: it is the bound of every pool, and a check of the simulation, which must
reach it with a pool that is large enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PIECE_TOKENS = 512
"""Tokens that one id stands for."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(33))


@dataclass(frozen=True, eq=False, slots=True)
class TracedRequest:
    """One request of a trace."""

    arrival_s: float
    """Seconds after the trace's start."""
    input_tokens: int
    """Tokens of the prompt."""
    output_tokens: int
    """Tokens that it generates."""
    ids: NDArray[np.int64]
    """Ids of the pieces of prompt and answer together, int64 `[pieces]`. The piece in which the
    prompt ends goes on with the answer; a shorter piece of an id is the beginning of a longer."""

    @property
    def prompt_pieces(self) -> int:
        """How many of `ids` the prompt reaches into."""
        return pieces_of(self.input_tokens)

    def prompt(self, vocab_size: int) -> NDArray[np.int32]:
        """The prompt's token ids, int32 `[input_tokens]`; see `tokens_of`."""
        ids = np.repeat(self.ids[: self.prompt_pieces], PIECE_TOKENS)[: self.input_tokens]
        return tokens_of(ids, np.arange(self.input_tokens) % PIECE_TOKENS, vocab_size)


class Trace(Protocol):
    """Requests in order of arrival; it can be read again and again, and is never all in memory."""

    def __iter__(self) -> Iterator[TracedRequest]: ...


def pieces_of(tokens: int) -> int:
    """Pieces that so many tokens reach into."""
    return -(-tokens // PIECE_TOKENS)


def tokens_of(
    ids: NDArray[np.int64], places: NDArray[np.int64], vocab_size: int
) -> NDArray[np.int32]:
    """Tokens by their piece and place: equal ones for equal ids, others for others.

    Each token is a hash of its id and place (the finalizer of splitmix64), so any few tokens in a
    row tell ids apart, and an engine's blocks may be smaller than a piece: with b tokens in a block
    two pieces have equal blocks by chance with a probability of vocab_size ** -b.

    Args:
        ids: of the tokens' pieces, `[tokens]`.
        places: of the tokens in their pieces, 0 to `PIECE_TOKENS` - 1, `[tokens]`.
        vocab_size: tokens are below it.

    Returns:
        int32 `[tokens]`.
    """
    x = (ids * PIECE_TOKENS + places).astype(np.uint64) + _GOLDEN
    for shift, factor in zip(_SHIFTS, _MIX):
        x = (x ^ (x >> shift)) * factor
    return ((x >> _SHIFTS[2]) % np.uint64(vocab_size)).astype(np.int32)


@dataclass(frozen=True)
class HitCeiling:
    """Tokens of a whole trace.

    Attributes:
        requests: how many.
        prompt_tokens: of all prompts.
        shared_tokens: of these, the ones that an earlier request's prompt or answer began with too.
        found_tokens: of these, the ones that an engine finds: whole blocks, never a
            prompt's last token, and never an answer's, whose keys and values nobody computes.
        longest: tokens of the longest prompt with its answer.
    """

    requests: int
    prompt_tokens: int
    shared_tokens: int
    found_tokens: int
    longest: int

    @property
    def shared_ratio(self) -> float:
        """Shared prompt tokens for each prompt token."""
        return self.shared_tokens / max(self.prompt_tokens, 1)

    @property
    def found_ratio(self) -> float:
        """The highest hit ratio that an engine can reach."""
        return self.found_tokens / max(self.prompt_tokens, 1)


def hit_ceiling(trace: Trace, block_size_tokens: int) -> HitCeiling:
    """Count what one cache without limits would find if each request came after the end of all
    before it; where requests overlap, answers are found less often."""
    seen = _Seen()
    requests = prompts = shared = found = longest = 0
    for request in trace:
        known = seen.shared_tokens(request)
        seen.add(request)
        requests += 1
        prompts += request.input_tokens
        shared += known
        whole = known // block_size_tokens * block_size_tokens
        found += min(whole, request.input_tokens - 1)
        longest = max(longest, request.input_tokens + request.output_tokens)
    return HitCeiling(requests, prompts, shared, found, longest)


class _Seen:
    """How many tokens of each piece were computed."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}

    def shared_tokens(self, request: TracedRequest) -> int:
        """Tokens that a prompt begins with and that were computed before."""
        total = 0
        for number, each in enumerate(request.ids[: request.prompt_pieces].tolist()):
            wanted = min(request.input_tokens - number * PIECE_TOKENS, PIECE_TOKENS)
            total += min(self._tokens.get(each, 0), wanted)
            if total < number * PIECE_TOKENS + wanted:
                break
        return total

    def add(self, request: TracedRequest) -> None:
        """Count a request; all tokens of its prompt and answer but the last are computed."""
        computed = request.input_tokens + request.output_tokens - 1
        for number, each in enumerate(request.ids.tolist()):
            tokens = min(computed - number * PIECE_TOKENS, PIECE_TOKENS)
            if tokens > self._tokens.get(each, 0):
                self._tokens[each] = tokens
