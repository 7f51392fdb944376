"""`EngineThread`: only one thread at a time may use an engine; calls on other threads raise."""

from __future__ import annotations

import threading

from megatron_async.errors import WrongThread


class EngineThread:
    """Which thread is at work in an engine: that of `run_engine`, or of a step or `generate` that
    has begun."""

    def __init__(self) -> None:
        self._owner: threading.Thread | None = None
        self._locks: list[threading.Lock] = []
        """One for each `with` that is entered, in any order: the thread is at work while one of
        them is locked."""

    def check(self) -> None:
        """Raise WrongThread if another thread is at work."""
        owner = self._owner
        if owner is None or owner is threading.current_thread():
            return
        if any(lock.locked() for lock in self._locks):
            raise WrongThread(
                f"this engine is at work on thread {owner.name!r} and was called on thread "
                f"{threading.current_thread().name!r}, which would break its books: call it there, "
                "from here by loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe of "
                "that thread's event loop."
            )

    def works(self) -> threading.Lock:
        """`with` what this returns, this thread is at work; it may be so within itself.

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
        return lock
