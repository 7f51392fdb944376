"""Runs the partitions of an emulated Gluon program, one at a time, in an order drawn by a seed.

A partition runs until it waits for what another one has to do, or, now and then, hands over at a
wait whose condition holds: so orders are tried that a GPU takes seldom.
"""

import random
import threading
from collections.abc import Callable, Sequence


class Partitions:
    """Threads of which one runs at a time; `seed` draws their order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._waits: dict[int, Callable[[], bool]] = {}
        self._running: int | None = None
        self._error: BaseException | None = None
        self._number = threading.local()

    @property
    def number(self) -> int:
        """Number of the partition that runs; 0 outside of `run`."""
        return getattr(self._number, "value", 0)

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run all to their ends; raises what the first of them raised."""
        self._waits = dict.fromkeys(range(len(functions)), lambda: True)
        threads = [
            threading.Thread(target=self._run_one, args=(number, function), daemon=True)
            for number, function in enumerate(functions)
        ]
        self._next()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait(self, holds: Callable[[], bool]) -> None:
        """Hand over until `holds`; outside of `run` it must hold."""
        if self._running is None:
            assert holds(), "waits for what nobody does"
            return
        if holds() and self._random.random() < 0.5:
            return
        number = self.number
        with self._changed:
            self._waits[number] = holds
            self._next()
            self._take(number)

    def _take(self, number: int) -> None:
        self._changed.wait_for(lambda: self._running == number or self._error is not None)
        if self._error is not None:
            raise SystemExit
        del self._waits[number]

    def _next(self) -> None:
        ready = [number for number, holds in self._waits.items() if holds()]
        if self._waits and not ready:
            self._error = AssertionError(f"partitions {sorted(self._waits)} wait for each other")
        self._running = self._random.choice(ready) if ready else None
        with self._changed:
            self._changed.notify_all()

    def _run_one(self, number: int, function: Callable[[], None]) -> None:
        self._number.value = number
        try:
            with self._changed:
                self._take(number)
            function()
        except SystemExit:
            return
        except BaseException as error:
            self._error = self._error or error
        with self._changed:
            self._next()
