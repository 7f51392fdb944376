"""Megatron's ten engine states, of an engine behind a coordinator.

A signal passes through two states. The transient one begins when the engine does what it was told,
the lasting one when every engine has: the coordinator collects the answers and confirms. The order
of states, and which of them may be waited for, are Megatron-Core 0.19's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from copy import copy
from enum import Enum

from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron_async.errors import EngineStopped


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


MOST_PAST = 64
"""Moments that are remembered for `wait_in_turn`; more signals than that are under way nowhere."""


class CoordinatedStates:
    """The state of one engine (Megatron's `EngineState`; never RESUMED, as in Megatron), and what
    it becomes."""

    def __init__(self) -> None:
        self.state = EngineState.RUNNING
        self._next: EngineState | None = None
        self._has_resumed = False
        self._error: BaseException | None = None
        # A waiter for a state goes on even if the next signal ends the state before it runs.
        self._waiting: dict[EngineState, list[asyncio.Future[None]]] = {s: [] for s in LASTING}
        self._past: deque[frozenset[EngineState]] = deque(maxlen=MOST_PAST)
        """The lasting states of each moment since the last `wait_in_turn` ended, the last one
        is now."""
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
        """The engine has left its coordinator, told or not; waiters for a state get the error, if
        there is one."""
        self.state, self._next, self._error = EngineState.STOPPED, None, error
        self._tell()

    async def wait_until(self, state: EngineState) -> None:
        """Wait for a lasting state.

        Raises:
            EngineStopped: the engine has left its coordinator, so that the state cannot come.
            Exception: what ended the engine before its time, such as RankLost.
        """
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[state].append(waiting)
        self._tell_waiting(state)
        await waiting

    async def wait_in_turn(self, state: EngineState) -> None:
        """Wait for a lasting state, or find that it has passed since the last such wait ended.

        For a rank that waits for the same states in the same order as the rank that sends the
        signals: it may be late, and find the engine in a later state.
        """
        if not any(state in moment for moment in self._past):
            await self.wait_until(state)
        while len(self._past) > 1 and state not in self._past[0]:
            self._past.popleft()

    def _tell(self) -> None:
        """Wake the waiters of the states that hold now."""
        moment = frozenset(state for state in LASTING if self.is_in(state))
        if not self._past or self._past[-1] != moment:
            self._past.append(moment)
        for state in LASTING:
            self._tell_waiting(state)

    def _tell_waiting(self, state: EngineState) -> None:
        error = self._error
        is_stopped = self.state is EngineState.STOPPED
        if error is None and not is_stopped and not self.is_in(state):
            return
        for waiting in self._waiting[state]:
            if waiting.done():  # cancelled
                continue
            if error is not None:
                told = copy(error)
                told.__cause__ = error
                waiting.set_exception(told)
            elif self.is_in(state):
                waiting.set_result(None)
            else:
                waiting.set_exception(
                    EngineStopped(
                        f"the engine has left its coordinator (STOPPED) and will not be "
                        f"{state.name}: wait for that before the engines are stopped."
                    )
                )
        self._waiting[state].clear()

    def is_in(self, state: EngineState) -> bool:
        """Whether a lasting state holds now."""
        if state is EngineState.RESUMED:
            return self._has_resumed
        if state is EngineState.PAUSED:
            return self.state in STANDING
        return self.state is state
