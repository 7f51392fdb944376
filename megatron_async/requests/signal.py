"""`Signal`: wakes all coroutines that wait for news, whichever event loop they run on."""

from __future__ import annotations

import asyncio


class Signal:
    """A wake-up call without memory: check what you wait for, then `wait`, then check again.

    Unlike `asyncio.Event` it belongs to no event loop, so an engine can serve several one after
    another, and `notify` may be called where none runs. All on one thread.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def notify(self) -> None:
        """Wake all who wait now."""
        for waiter in self._waiters:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)
