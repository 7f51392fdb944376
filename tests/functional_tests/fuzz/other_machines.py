"""Machines whose steps fail, are interrupted, or go on for others when their engine is stopped; or
whose memory goes and comes. Each is one of its own: one more rule in `EngineMachine` would change
all its schedules."""

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

from megatron_async import DynamicInferenceEngine
from megatron_async.config import InferenceConfig
from megatron_async.device_state.cache_layout import block_needs
from megatron_async.engine.listener import EngineListener
from tests.functional_tests.fuzz.engine_machine import (
    EngineMachine,
    needs_a_request,
    runs,
    some_request,
)
from tests.functional_tests.fuzz.fuzz_requests import Ask, SerialAnswers, asks
from tests.support.attention_model import AttentionModel
from tests.support.bytecodes import AtBytecode, ctrl_c, interrupt
from tests.support.hybrid_model import HYBRID_MODELS
from tests.support.memory_channel import BesideOthers
from tests.support.mtp_model import MTP_MODELS
from tests.support.window_model import WINDOW, WindowModel, with_window

MOST_FAILURES = 4


class FailingMachine(EngineMachine):
    """Requests of a step that fails may end with it, and no others; these say what they say
    alone."""

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


MOST_BYTECODES = 3001
"""Few steps have more; one that has fewer is not interrupted."""
bytecodes = st.integers(1, MOST_BYTECODES - 1).map(lambda number: number * 1237 % MOST_BYTECODES)
"""All as likely: Hypothesis prefers small numbers."""
SPARED = (DynamicInferenceEngine.step_modern.__code__, DynamicInferenceEngine._end_turn.__code__)
"""What is raised there, where no signal can come, may lose a report that is done."""


class Mendings(EngineListener):
    """Counts them."""

    count = 0

    def mended(self, error: BaseException) -> None:
        self.count += 1


class InterruptedMachine(EngineMachine):
    """Ctrl-C between two bytecodes fails no request and loses no report; what is raised in the
    middle of a step, as no signal is, fails the step's requests at most."""

    def add_requests(self, requests: Any) -> None:
        """The first ones come with a new engine: from now on its device is not interrupted."""
        if not hasattr(self, "_coming"):
            self._coming: list[tuple[int, bool]] = []
            self._mendings = Mendings()
            self.engine.listeners.append(self._mendings)
            for stream in (self.device.upload, self.device.compute, self.device.copy):
                stream.run_to = self._untraced(stream.run_to)  # type: ignore[method-assign]
        super().add_requests(requests)
        self._expect_failures()

    @staticmethod
    def _untraced(run_to: Callable[[int], None]) -> Callable[[int], None]:
        def run(position: int) -> None:
            before = sys.gettrace()
            sys.settrace(None)
            try:
                run_to(position)
            finally:
                sys.settrace(before)

        return run

    def _expect_failures(self) -> None:
        for tracked in self.unfinished.values():
            tracked.may_fail |= any(not is_signal for _, is_signal in self._coming)

    @runs
    @rule(numbers=st.lists(bytecodes, min_size=3, max_size=8))
    def signals_come(self, numbers: list[int]) -> None:
        self.script.append(f"# the next steps are interrupted by signals at {numbers}")
        self._coming += [(number, True) for number in numbers]

    @runs
    @rule(numbers=st.lists(bytecodes, min_size=3, max_size=8))
    def interrupts_are_raised(self, numbers: list[int]) -> None:
        self.script.append(f"# the next steps are cut short at {numbers}")
        self._coming += [(number, False) for number in numbers]
        self._expect_failures()

    def _step(self) -> None:
        if not self._coming:
            super()._step()
            return
        number, is_signal = self._coming.pop(0)
        self._mendings.count = 0
        self.watch.before_step()
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with AtBytecode(number, ctrl_c if is_signal else interrupt, SPARED):
                report = self.engine.step_modern()
        except KeyboardInterrupt:
            self.counts["signals" if is_signal else "raised"] += 1
            self.watch.take_counts()
            assert not (is_signal and self._mendings.count), "a signal has cut a step short"
            return
        finally:
            signal.signal(signal.SIGINT, handler)
        self._book(report)


MOST_STEPS = 5


class ExpertMachine(EngineMachine):
    """Other ranks need its experts for some steps more at each stop."""

    def add_requests(self, requests: Any) -> None:
        """The first ones come with a new engine."""
        if not isinstance(self.engine.group, BesideOthers):
            self.engine.loop.join(BesideOthers(0))
        super().add_requests(requests)

    @rule(steps=st.integers(0, MOST_STEPS))
    def others_run(self, steps: int) -> None:
        """Steps of others, as many as are left at the next stops."""
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


class NarrowMachine(EngineMachine):
    """Keys and values are in fp8, those of the serial answers too."""

    answers: ClassVar[dict[str, SerialAnswers]] = {}
    watches_mtp = False

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        for name, model in self.models.items():
            if name not in self.answers:
                self.answers[name] = SerialAnswers(model, kv_cache_dtype="fp8")
        return {**settings, "kv_cache_dtype": "fp8"}


class WindowMachine(EngineMachine):
    """Models have layers with a window: beside full ones, or with an MTP layer, which is full."""

    models: ClassVar[dict[str, AttentionModel]] = {
        name: WindowModel() if name == "AttentionModel" else with_window(MTP_MODELS[name]())
        for name in ("AttentionModel", *MTP_MODELS)
    } | {kind.__name__: WindowModel(1 + n) for n, kind in enumerate(HYBRID_MODELS)}
    answers: ClassVar[dict[str, SerialAnswers]] = {}
    watches_mtp = False

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        for name, model in self.models.items():
            if name not in self.answers:
                self.answers[name] = SerialAnswers(model, num_kv_blocks=2)
        needs = block_needs((0, WINDOW), InferenceConfig(**settings))
        # A pool that was made for full layers alone.
        return {**settings, "num_kv_blocks": needs.of(settings["num_kv_blocks"])}


class SleepingMachine(EngineMachine):
    """After every few steps a suspend gives memory back, in turn with a copy and without one; it
    comes back where it was, or elsewhere."""

    steps = 0

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, "enable_sleep_mode": settings["max_requests"] % 2 == 0}

    def _step(self) -> None:
        super()._step()
        self.steps += 1
        if self.steps % 4 or self.steps > 24 or self.engine.is_stopped:
            return
        copies = ["kv_cache"] if self.steps % 8 else []
        self.script.append(f"engine.suspend(free=['kv_cache'], copies={copies})")
        self.counts["copied" if copies else "freed"] += len(self.unfinished) > 0
        self.engine.suspend(free=["kv_cache"], copies=copies)
        self._deliver()
        self.resume()
