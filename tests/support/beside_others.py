"""`BesideOthers`: stands for the ranks that share experts with an engine, in one process."""

from typing import override

from megatron_async.planning.step_plan import StepShape
from megatron_async.ranks.rank_group import RankGroup


class BesideOthers(RankGroup):
    """A rank that shares experts with others, which run `steps` more whenever this one stops;
    `launched` counts the steps that this rank was asked for."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._left = 0
        self.launched = 0

    @override
    def stop_together(self, is_stopping: bool) -> None:
        self._left = self.steps if is_stopping else 0

    @property
    @override
    def must_keep_up(self) -> bool:
        return self._left > 0

    @override
    def agree(self, step: int, wanted: StepShape, has_work: bool) -> StepShape:
        if not self._left:
            return wanted
        self._left -= 1
        self.launched += 1
        return StepShape(decode_rows=2, tokens=2)
