"""All-reduce among threads of one process."""

from __future__ import annotations

import asyncio
import threading

from tests.support.patience import PATIENCE_S


class MemoryCommunicator:
    """One member's end; make all ends with `group`."""

    def __init__(self, shared: _Rounds, rank: int) -> None:
        self._shared, self._rank = shared, rank
        self._rounds = 0

    @classmethod
    def group(cls, size: int) -> list[MemoryCommunicator]:
        """The ends of a group."""
        shared = _Rounds(size)
        return [cls(shared, rank) for rank in range(size)]

    def sync_all_reduce_max(self, *values: int) -> list[int]:
        self._rounds += 1
        return self._shared.reduce(self._rounds, self._rank, values)

    def has_started(self) -> bool:
        return self._shared.latest > self._rounds

    async def started(self) -> None:
        while not self.has_started():
            await asyncio.sleep(0.001)


class _Rounds:
    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[int, dict[int, tuple[int, ...]]] = {}
        self._news = threading.Condition()
        self.latest = 0

    def reduce(self, number: int, rank: int, values: tuple[int, ...]) -> list[int]:
        with self._news:
            mine = self._values.setdefault(number, {})
            mine[rank] = values
            self.latest = max(self.latest, number)
            self._news.notify_all()
            done = self._news.wait_for(lambda: len(mine) == self._size, timeout=PATIENCE_S)
            assert done, f"round {number}: only ranks {sorted(mine)} came"
            self._values.pop(number - 2, None)
            return [max(column) for column in zip(*mine.values(), strict=True)]
