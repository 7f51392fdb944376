"""Megatron's ten engine states, of an engine behind a coordinator.

A signal passes through two states. The transient one begins when the engine does what it was told,
the lasting one when every engine has: the coordinator collects the answers and confirms. The order
of states, and which of them may be waited for, are Megatron-Core 0.19's.
"""

from __future__ import annotations

import asyncio
from copy import copy
from enum import Enum

from megatron.core.inference.engines.dynamic_engine import EngineState


class Signal(Enum):
    """What a client tells all engines; Megatron's names of `Headers`."""

    PAUSE = "PAUSE"
    UNPAUSE = "UNPAUSE"
    SUSPEND = "SUSPEND"
    RESUME = "RESUME"
    STOP = "STOP"
    SET_GENERATION_EPOCH = "SET_GENERATION_EPOCH"
    START_CUDA_PROFILER = "START_CUDA_PROFILER"
    STOP_CUDA_PROFILER = "STOP_CUDA_PROFILER"


STEPS = {
    Signal.PAUSE: ({EngineState.RUNNING}, EngineState.PAUSING, EngineState.PAUSED),
    Signal.UNPAUSE: ({EngineState.PAUSED}, EngineState.UNPAUSING, EngineState.RUNNING),
    Signal.SUSPEND: ({EngineState.PAUSED}, EngineState.SUSPENDING, EngineState.SUSPENDED),
    # RESUMED can be waited for; the engine itself is PAUSED then.
    Signal.RESUME: ({EngineState.SUSPENDED}, EngineState.RESUMING, EngineState.PAUSED),
    Signal.STOP: (
        {EngineState.PAUSED, EngineState.SUSPENDED},
        EngineState.STOPPING,
        EngineState.STOPPED,
    ),
}
"""For each signal: the states in which it is followed, the transient one, the lasting one."""
STANDING = frozenset(EngineState) - {EngineState.RUNNING, EngineState.PAUSING}
"""A wait for PAUSED ends in any of these states: the engine runs no steps until UNPAUSE."""


LASTING = (
    EngineState.RUNNING,
    EngineState.PAUSED,
    EngineState.SUSPENDED,
    EngineState.RESUMED,
    EngineState.STOPPED,
)
"""States that can be waited for."""


class CoordinatedStates:
    """The state of one engine, and what it becomes.

    Attributes:
        state: Megatron's `EngineState`; never RESUMED, as in Megatron.
    """

    def __init__(self) -> None:
        self.state = EngineState.RUNNING
        self._next: EngineState | None = None
        self._has_resumed = False
        self._error: BaseException | None = None
        # Who waits for a state goes on even if the next signal ends it before the waiter runs.
        self._events = {state: asyncio.Event() for state in LASTING}
        self._tell()

    def begin(self, signal: Signal) -> bool:
        """A signal has come.

        Returns:
            whether the engine must do something: not for a PAUSE of one that stands still.

        Raises:
            ValueError: the signal cannot be followed in this state.
        """
        if signal is Signal.PAUSE and self.state in STANDING - {EngineState.STOPPED}:
            return False
        allowed, transient, lasting = STEPS[signal]
        if self.state not in allowed:
            names = " or ".join(sorted(state.name for state in allowed))
            raise ValueError(
                f"{signal.name} is ignored by an engine that is {self.state.name}: it must be "
                f"{names}, so wait for that first (engine.wait_until)."
            )
        self.state, self._next = transient, lasting
        if signal is Signal.SUSPEND:
            self._has_resumed = False
        self._tell()
        return True

    def confirm(self, signal: Signal) -> None:
        """All engines have followed a signal. One that changes no state may be confirmed while the
        next signal is under way: that says nothing of the state."""
        if self._next is None or signal not in STEPS or STEPS[signal][1] is not self.state:
            return
        self._has_resumed |= self.state is EngineState.RESUMING
        self.state, self._next = self._next, None
        self._tell()

    def stop(self, error: BaseException | None = None) -> None:
        """The engine has left its coordinator, told or not.

        Args:
            error: why it could not stay; who waits for a state gets it.
        """
        self.state, self._next, self._error = EngineState.STOPPED, None, error
        self._tell()

    async def wait_until(self, state: EngineState) -> None:
        """Wait for a lasting state.

        Raises:
            Exception: what ended the engine before its time, such as RankLost.
        """
        await self._events[state].wait()
        if self._error is not None:
            raise copy(self._error) from self._error

    def _tell(self) -> None:
        """Wake who waits for what is so now."""
        for state, event in self._events.items():
            if self._error is not None or self._is_in(state):
                event.set()
            else:
                event.clear()

    def _is_in(self, state: EngineState) -> bool:
        if state is EngineState.RESUMED:
            return self._has_resumed
        if state is EngineState.PAUSED:
            return self.state in STANDING
        return self.state is state
