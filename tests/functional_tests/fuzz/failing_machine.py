"""`FailingMachine`: an `EngineMachine` some of whose steps raise on the device."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.functional_tests.fuzz.engine_machine import (
    EngineMachine,
    needs_a_request,
    runs,
    some_request,
)
from tests.functional_tests.fuzz.fuzz_requests import Ask, asks

MOST_FAILURES = 4


class FailingMachine(EngineMachine):
    """Requests of a step that fails may end with it, and no others; these say what they say alone.

    A machine of its own: one more rule in `EngineMachine` would change all its schedules.
    """

    def __init__(self) -> None:
        super().__init__()
        self._failures = 0
        self._is_late = False
        self._poison: int | None = None
        self._served: deque[set[int]] = deque()
        """Requests of the steps that are launched and not yet computed."""

    def add_requests(self, requests: Any) -> None:
        """The first ones come with a new engine; any may fail from now on."""
        if not hasattr(self, "_compute"):
            self._install()
        super().add_requests(requests)
        for tracked in self.unfinished.values():
            tracked.may_fail = True

    def _install(self) -> None:
        controller, slots = self.engine.controller, self.engine.context.slots
        self._compute, launch = controller._compute_step, controller.enqueue_step

        def launch_step(plan: Any) -> Any:
            self._served.append({slots.request_at(s).request_id for s in plan.slots.tolist()})
            return launch(plan)

        controller.enqueue_step = launch_step  # type: ignore[method-assign]
        controller._compute_step = self._compute_or_fail  # type: ignore[method-assign]

    def _compute_or_fail(self, *arguments: Any) -> Any:
        is_poisoned = self._poison in self._served.popleft()
        if not self._failures and not is_poisoned:
            return self._compute(*arguments)
        self._failures = max(self._failures - 1, 0)
        self.counts["failed_steps"] += 1
        if self._is_late:
            self._compute(*arguments)
        raise ValueError("planned")

    @runs
    @rule(times=st.integers(1, MOST_FAILURES), late=st.booleans())
    def steps_fail(self, times: int, late: bool) -> None:
        """The next steps that the device computes raise: before they have done anything, or when
        all is done but what tells the host."""
        self.script.append(f"# the next {times} steps fail, {'late' if late else 'early'}")
        self._failures, self._is_late = times, late

    @needs_a_request
    @rule(which=some_request)
    def every_step_of_a_request_fails(self, which: int) -> None:
        self._poison = self._pick(which)
        self.script.append(f"# from now on all steps of request {self._poison} fail")

    @runs
    @rule(ask=asks, times=st.integers(1, MOST_FAILURES), late=st.booleans())
    def a_request_whose_steps_fail_comes(self, ask: Ask, times: int, late: bool) -> None:
        """Steps that are in flight without this request fail as well."""
        self.step_modern(2)
        self.steps_fail(times, late)
        self.add_requests([ask])
        if ask.request_id in self.unfinished:
            self.every_step_of_a_request_fails(sorted(self.unfinished).index(ask.request_id))

    def _finish(self) -> None:
        self._failures = 0
        super()._finish()
