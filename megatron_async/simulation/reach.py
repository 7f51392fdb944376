"""`Reach`: the steps that a recording has seen, beyond which a fit to it is a guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_async.contexts.step_plan import StepPlan

Work = tuple[int, int, int]
"""Work of a step: prefill tokens, query tokens of decode rows (padding included) and KV tokens."""
NAMES = ("prompt tokens", "decode tokens", "KV tokens")


def work_of(plan: StepPlan) -> Work:
    """The work of a step, as recordings tell it."""
    return *plan.work_tokens, int(plan.kv_at_most.sum())


class Reach(NamedTuple):
    """The least and the most work of one step."""

    least: Work
    most: Work

    @classmethod
    def of(cls, steps: Sequence[Work]) -> Reach:
        """What these steps reach, each kind of work by itself."""
        least, most = zip(*((min(kind), max(kind)) for kind in zip(*steps)))
        return cls(least, most)

    @property
    def varies(self) -> tuple[bool, ...]:
        """Whether steps with more and with less of a kind of work were seen: only then is known
        what it costs."""
        return tuple(most > least for least, most in zip(*self))

    def __str__(self) -> str:
        return ", ".join(f"{most:,} {name}" for most, name in zip(self.most, NAMES)) + " in a step"

    def exceeded_by(self, most: Work) -> list[str]:
        """What a simulation did that no recorded step did.

        Args:
            most: work of its steps.
        """
        return [
            f"{more:,} {name} (recorded: {seen:,}"
            + (")" if varies else ", always, so more of them are taken to cost nothing)")
            for more, name, seen, varies in zip(most, NAMES, self.most, self.varies)
            if more > seen
        ]
