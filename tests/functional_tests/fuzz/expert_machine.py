"""`ExpertMachine`: an `EngineMachine` whose engine steps on for others when it is stopped."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.functional_tests.fuzz.engine_machine import EngineMachine, needs_a_request, runs
from tests.support.beside_others import BesideOthers

MOST_STEPS = 5


class ExpertMachine(EngineMachine):
    """Other ranks need its experts for some steps more at each stop.

    A machine of its own: one more rule in `EngineMachine` would change all its schedules.
    """

    def add_requests(self, requests: Any) -> None:
        """The first ones come with a new engine."""
        if not isinstance(self.engine.group, BesideOthers):
            self.engine.loop.join(BesideOthers(0))
        super().add_requests(requests)

    @rule(steps=st.integers(0, MOST_STEPS))
    def others_run(self, steps: int) -> None:
        """So many steps of others are left at the next stops."""
        self.script.append(f"# at each stop, {steps} steps for others")
        self.engine.group.steps = steps

    @runs
    @needs_a_request
    @rule(suspends=st.booleans(), steps=st.integers(1, MOST_STEPS), before=st.integers(1, 4))
    def stop_during_async_step(self, suspends: bool, steps: int, before: int) -> None:
        """While it waits for samples, all buffers of samples are in use."""
        self.step_modern(before)
        self.others_run(steps)
        self.script.append(f"# {'suspend' if suspends else 'pause'} during a step")

        async def step_and_stop() -> None:
            step = asyncio.create_task(self.engine.async_step())
            await asyncio.sleep(0)  # it launches, and waits if it has to
            is_over = step.done()
            if is_over:
                self._book(await step)
            if suspends:
                self.engine.suspend(True)
            else:
                self.engine.pause()
            if not is_over:
                self.counts["stopped_steps"] += 1
                self.watch.take_counts()
                self.watch.before_step()  # what is left of the step only reports
                self._book(await step)

        self.watch.before_step()
        self._run(step_and_stop())
        self._deliver()
        self.unpause()
        self.resume()

    def _deliver(self) -> None:
        self.watch.take_counts()
        super()._deliver()

    def _finish(self) -> None:
        self.counts["steps_for_others"] += self.engine.group.launched
        super()._finish()
