"""`NgramWatch`: every draft of the n-gram drafter is what a search in Python finds.

A wrong draft changes no token, only how many come at once: a stale or a foreign token would never
be seen in the output.
"""

from __future__ import annotations

from megatron_async import DynamicInferenceEngine
from megatron_async.ops.drafting.ngram_lookup import LONGEST, SEARCHED, SHORTEST
from tests.support.draft_watch import DraftWatch


def wanted_drafts(tokens: list[int], count: int, searched: int = SEARCHED) -> list[int]:
    """The drafts that must follow `tokens`: what followed the longest match of the last ones,
    of equal ones the latest; `count` tokens, all -1 where there is none."""
    known = tokens[max(len(tokens) - 1 - searched, 0) :]
    for length in range(LONGEST, SHORTEST - 1, -1):
        for start in range(len(known) - length - 1, -1, -1):
            if known[start : start + length] == known[-length:]:
                text, place = list(known), start + length
                for draft in range(count):
                    text.append(text[place + draft])
                return text[len(known) :]
    return [-1] * count


class NgramWatch(DraftWatch):
    """Compares the drafts of every step that an engine books.

    Args:
        engine: with the n-gram drafter.

    Attributes:
        found: rows that had drafts.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        super().__init__(engine)
        self.found = 0

    def look(self, step: int, slot: int, tokens: list[int], drafts: list[int]) -> None:
        allowed = int(self.slots.drafts[slot])
        wanted = wanted_drafts(tokens, self.count)[:allowed] + [-1] * (self.count - allowed)
        assert drafts == wanted, (step, slot, tokens, drafts, wanted)
        self.found += wanted[:1] > [-1]
