"""Changes of an engine's books are made by one thread (`EngineThread`), and as a whole or made
good (`Turn`)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from megatron_async.errors import JobFailed, WrongThread
from megatron_async.interrupts import HeldInterrupts, is_below

BRIEF_S = 0.0005
"""Seconds between two looks at brief work."""


class EngineThread:
    """The thread that is at work in an engine: of `run_engine`, or of a step or `generate` that
    has begun."""

    def __init__(self) -> None:
        self._owner: threading.Thread | None = None
        self._locks: list[threading.Lock] = []
        """One for each `with` that is entered, in any order: the thread is at work while one of
        them is locked."""
        self._brief = threading.Lock()
        """The lock of work that ends by itself, soon: other threads wait for it."""

    def check(self) -> None:
        """Raise WrongThread if another thread is at work."""
        owner = self._owner
        if owner is None or owner is threading.current_thread():
            return
        while self._brief.locked():
            time.sleep(BRIEF_S)
        if any(lock.locked() for lock in self._locks):
            raise WrongThread(
                f"this engine is at work on thread {owner.name!r} and was called on thread "
                f"{threading.current_thread().name!r}, which would break its books: call it there, "
                "from here by loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe of "
                "that thread's event loop."
            )

    def works(self, is_brief: bool = False) -> threading.Lock:
        """`with` what this returns, this thread is at work; it may be so within itself. If that
        `is_brief`, other threads wait for its end.

        No bytecode is run when a lock's `with` begins and ends. A method in Python could be cut
        short by Ctrl-C where it begins, and the engine would have this thread for ever.

        Raises:
            WrongThread: another thread is at work.
        """
        thread, lock = threading.current_thread(), threading.Lock()
        if self._owner is not thread:
            self.check()
            self._owner = thread
        self._locks = [each for each in self._locks if each.locked()] + [lock]
        if is_brief:
            self._brief = lock
        return lock


class Turn:
    """`with` it around everything that changes an engine's books: the launch of a step, its
    booking, an admission. It never contains a wait for the device.

    Ctrl-C takes effect at its end. Whatever else leaves it in the middle, at any bytecode (a
    MemoryError, the SystemExit of somebody's callback, a handler of another signal that raises, a
    second Ctrl-C), leaves books of which nobody knows how far they are written. They are mended
    before anything goes on: at once, or, if that is cut short too, when the next turn begins.

    Args:
        mend: a weak reference to a method that makes the books whole, after this error. It may be
            called again if it raises.
    """

    def __init__(self, mend: Callable[[], Callable[[BaseException], None] | None]) -> None:
        self._mend = mend
        self._interrupts = HeldInterrupts()
        self._opener: FrameType | None = None
        """Whose `with` it is: a turn within a turn is a part of it."""
        self._is_whole = True
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        caller = sys._getframe(1)
        if self._opener is not None and is_below(self._opener, caller):
            return
        try:
            self._opener = caller
            self._interrupts.begin(caller)
            if not self._is_whole:
                self._make_whole()
            self._is_whole = False
        except BaseException:
            self._opener = None
            self._interrupts.end()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._opener is not sys._getframe(1):
            return
        try:
            if error is None or isinstance(error, JobFailed):  # for which all requests fail
                self._is_whole = True
            else:
                self._error = error
                self._make_whole()
        finally:
            self._opener = None
            self._interrupts.end()

    def make_whole(self) -> None:
        """Mend books that could not be mended when something had cut a turn short."""
        if not self._is_whole:
            with self:
                pass

    def _make_whole(self) -> None:
        if (mend := self._mend()) is not None:
            mend(self._error or KeyboardInterrupt("at a turn's beginning or end"))
        self._error = None
        self._is_whole = True
