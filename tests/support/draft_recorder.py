"""`DraftRecorder`: what was drafted after which tokens."""

from __future__ import annotations

from megatron_async import DynamicInferenceEngine
from tests.support.draft_watch import DraftWatch


class DraftRecorder(DraftWatch):
    """Keeps all drafts.

    Args:
        engine: that drafts.

    Attributes:
        drafts: by the tokens of the sequence.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        super().__init__(engine)
        self.drafts: dict[tuple[int, ...], list[int]] = {}

    def look(self, step: int, slot: int, tokens: list[int], drafts: list[int]) -> None:
        if (room := self.room(slot, tokens)) > 0:
            self.drafts[tuple(tokens)] = drafts[:room]
