"""`DraftRecorder`: what was drafted behind which tokens."""

from __future__ import annotations

import numpy as np

from megatron_async import DynamicInferenceEngine
from megatron_async.engines.listener import EngineListener
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep


class DraftRecorder(EngineListener):
    """Looks at the drafts of every step that an engine books.

    Args:
        engine: that drafts.

    Attributes:
        drafts: by the tokens of the sequence.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._slots = engine.context.slots
        self.drafts: dict[tuple[int, ...], list[int]] = {}
        engine.listeners.append(self)

    def resolved(self, step: LaunchedStep) -> None:
        plan, slots = step.plan, self._slots
        live = (slots.generation[plan.slots] == plan.generations) & plan.produces
        for row in np.flatnonzero(live):
            slot = plan.slots[row]
            tokens = slots.tokens[slot, : slots.num_known[slot]].tolist()
            room = int(slots.max_length[slot]) - 1 - len(tokens)
            if room > 0:
                self.drafts[tuple(tokens)] = step.drafts[row].tolist()[:room]
