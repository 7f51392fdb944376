"""`NgramWatch`: every draft of the n-gram drafter is what a search in Python finds.

A wrong draft changes no token, only how many come at once: a stale or a foreign token would never
be seen in the output.
"""

from __future__ import annotations

import numpy as np

from megatron_async import DynamicInferenceEngine
from megatron_async.engines.listener import EngineListener
from megatron_async.ops.drafting.ngram_lookup import LONGEST, SEARCHED, SHORTEST
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep


def wanted_drafts(tokens: list[int], count: int, searched: int = SEARCHED) -> list[int]:
    """What must be drafted behind `tokens`: what stood behind the longest match of the last ones,
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


class NgramWatch(EngineListener):
    """Looks at the drafts of every step that an engine books.

    Args:
        engine: with the n-gram drafter.

    Attributes:
        found: rows that had drafts.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._slots = engine.context.slots
        self._count = engine.context.config.num_speculative_tokens
        self.found = 0
        engine.listeners.append(self)

    def resolved(self, step: LaunchedStep) -> None:
        plan, slots = step.plan, self._slots
        if step.error is not None:
            return
        live = (slots.generation[plan.slots] == plan.generations) & plan.produces
        for row in np.flatnonzero(live):
            slot = plan.slots[row]
            tokens = slots.tokens[slot, : slots.num_known[slot]].tolist()
            allowed = int(slots.drafts[slot])
            wanted = wanted_drafts(tokens, self._count)[:allowed] + [-1] * (self._count - allowed)
            reported = step.drafts[row].tolist()
            assert reported == wanted, (plan.step, int(slot), tokens, reported, wanted)
            self.found += wanted[:1] > [-1]
