"""`DraftWatch`: sees what an engine's steps have drafted, and after which tokens."""

from __future__ import annotations

import numpy as np

from megatron_async import DynamicInferenceEngine
from megatron_async.engines.listener import EngineListener
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep


class DraftWatch(EngineListener):
    """Calls `look` for the rows of every booked step that yielded a token of their request.

    Args:
        engine: that drafts.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.slots = engine.context.slots
        self.count = engine.context.config.num_speculative_tokens
        engine.listeners.append(self)

    def resolved(self, step: LaunchedStep) -> None:
        plan, slots = step.plan, self.slots
        if step.error is not None:
            return
        live = (slots.generation[plan.slots] == plan.generations) & plan.produces
        for row in np.flatnonzero(live).tolist():
            slot = int(plan.slots[row])
            tokens = slots.tokens[slot, : slots.num_known[slot]].tolist()
            self.look(plan.step, slot, tokens, step.drafts[row].tolist())

    def room(self, slot: int, tokens: list[int]) -> int:
        """Drafts that could be fed: none stands after the last place that a request may fill."""
        return int(self.slots.max_length[slot]) - 1 - len(tokens)

    def look(self, step: int, slot: int, tokens: list[int], drafts: list[int]) -> None:
        """Take one row.

        Args:
            step: its number.
            slot: of the request.
            tokens: all of its sequence, with the step's.
            drafts: for the next step, -1 from where on there is none.
        """
        raise NotImplementedError
