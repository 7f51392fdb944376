"""`Invalidation`: the policy for steps in flight when a request that they serve ends."""

from __future__ import annotations

from megatron_async.contexts.step_plan import StepPlan
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep


class Invalidation:
    """The policy "reconcile": every step is booked. Rows of requests that have ended are recognised
    by (slot, generation) and dropped: zombie rows. The policy waits for nothing and repeats
    nothing.

    The engine reports events to its policy, and asks which steps to discard. Another policy
    overrides all methods.
    """

    @property
    def is_draining(self) -> bool:
        """Whether no step may be launched before those in flight are resolved or discarded."""
        return False

    def before_launch(self, plan: StepPlan) -> None:
        """The step of `plan` is launched next."""

    def before_release(self, slot: int) -> None:
        """The request in `slot` has ended: with its last token, by an abort or by a failed step. It
        loses its slot next."""

    def forget(self) -> None:
        """The steps in flight are dropped, and no request holds a slot."""

    def discards(self, step: LaunchedStep) -> bool:
        """Whether `step`, just removed from the steps in flight, must not be booked; its work is
        done."""
        return False
