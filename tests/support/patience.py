"""How long a test waits for what must come: an end for what hangs, never a bound on how fast; and
event loops whose clock moves when a loop waits, or when a test moves it: tests of timers then do
not depend on the machine."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

PATIENCE_S = 240.0
"""Below pytest's own limit (300 s), whose traceback would not say what was waited for."""


def eventually(condition: Callable[[], object], what: str = "", every_s: float = 0.005) -> None:
    """Wait until `condition()` is true; an AssertionError with `what` after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what or condition}: not within {PATIENCE_S:g} s"
        time.sleep(every_s)


class Clock:
    """The clock of all virtual loops, in seconds; in place of the module `time` as well."""

    now = 1000.0

    @classmethod
    def read(cls) -> float:
        return cls.now


TIME = SimpleNamespace(monotonic=Clock.read, perf_counter=Clock.read)


class _Jumps(selectors.DefaultSelector):
    """A wait takes no time of the machine, and all of the clock's."""

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout:
            Clock.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """For coroutines of one thread without sockets."""

    def __init__(self) -> None:
        super().__init__(_Jumps())

    def time(self) -> float:
        return Clock.now


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, like `asyncio.run`, on a virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
