"""`EngineThread`: only one thread at a time may use an engine; calls on other threads raise."""

from __future__ import annotations

import threading

from megatron_async.errors import WrongThread


class EngineThread:
    """Which thread is at work in an engine: that of `run_engine`, or of a step or `generate` that
    has begun. `with` it while it works; it may do so within itself."""

    def __init__(self) -> None:
        self._owner: threading.Thread | None = None
        self._depth = 0

    def check(self) -> None:
        """Raise WrongThread if another thread is at work."""
        owner = self._owner
        if owner is not None and owner is not threading.current_thread():
            raise WrongThread(
                f"this engine is at work on thread {owner.name!r} and was called on thread "
                f"{threading.current_thread().name!r}, which would break its books: call it there, "
                "from here by loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe of "
                "that thread's event loop."
            )

    def __enter__(self) -> None:
        self.check()
        self._owner = threading.current_thread()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
