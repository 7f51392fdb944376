"""`EngineListener`: the interface for events of requests and steps, in their order."""

from __future__ import annotations

from megatron_async.planning.step_output import StepOutput
from megatron_async.planning.step_plan import StepPlan
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.weight_versions import Version
from megatron_async.step.text_generation_controller import LaunchedStep


class EngineListener:
    """Listens and does nothing; subclasses override what they want to know, and are put into
    `engine.listeners`, which are called in their order.

    All methods run on the engine's own path, so they must be quick and must not wait.
    """

    def added(self, request: DynamicInferenceRequest) -> None:
        """A servable request was queued."""

    def aborted(self, request_id: int) -> None:
        """An unfinished request is about to be aborted."""

    def evicted_all(self) -> None:
        """Every running request was evicted: the engine gives its KV cache back."""

    def updated(self, step: int, version: Version, policy: str) -> None:
        """The weights are others from step `step` on, which is planned next, and what their
        update's `policy` says of unfinished requests is done; "label": the version alone is
        another."""

    def mended(self, error: BaseException) -> None:
        """An error has cut a step or an admission short: the steps in flight are dropped, and every
        running request was evicted."""

    def launching(self, plan: StepPlan) -> None:
        """A step is about to be launched: work enqueued now runs before the step's device work."""

    def launched(self, plan: StepPlan | None) -> None:
        """A step was launched; None: no step could be launched before a resolve."""

    def booked(self, output: StepOutput) -> None:
        """The tokens of a step were booked, and what ended with it has ended; the arrays stay as
        they are."""

    def resolved(self, step: LaunchedStep) -> None:
        """A step was booked, and what ended with it has ended. Its samples are the ring's, to be
        copied at once."""

    def ended(self, request: DynamicInferenceRequest, reason: str) -> None:
        """A request ends with the step that is being booked; its generated tokens are there."""
