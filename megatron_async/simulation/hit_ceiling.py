"""`hit_ceiling`: prompt tokens that a cache without limits would find, from a trace's ids alone.

No engine runs for it: it is the bound of every pool, and a check of the simulation, which must
reach it with a pool that is large enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.simulation.traced_requests import PIECE_TOKENS, Trace, TracedRequest


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
    before it; where requests overlap, answers are found less often.

    Args:
        trace: read once.
        block_size_tokens: of the engine.
    """
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
