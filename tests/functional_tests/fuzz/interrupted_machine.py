"""`InterruptedMachine`: an `EngineMachine` some of whose steps are interrupted between two
bytecodes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from megatron_async import DynamicInferenceEngine
from megatron_async.engine.listener import EngineListener
from tests.functional_tests.fuzz.engine_machine import EngineMachine, runs
from tests.support.bytecodes import AtBytecode, ctrl_c, interrupt

MOST_BYTECODES = 3001
"""Few steps have more; one that has fewer is not interrupted."""
bytecodes = st.integers(1, MOST_BYTECODES - 1).map(lambda number: number * 1237 % MOST_BYTECODES)
"""All as likely: Hypothesis prefers small numbers."""
SPARED = (
    DynamicInferenceEngine.step_modern.__code__,
    DynamicInferenceEngine._end_turn.__code__,
)
"""What is raised there, where no signal can come, may lose a report that is done."""


class Mendings(EngineListener):
    """Counts them."""

    count = 0

    def mended(self, error: BaseException) -> None:
        self.count += 1


class InterruptedMachine(EngineMachine):
    """Ctrl-C fails no request and loses no report; what is raised in the middle of a step, as no
    signal is, fails the step's requests at most.

    A machine of its own: one more rule in `EngineMachine` would change all its schedules.
    """

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
