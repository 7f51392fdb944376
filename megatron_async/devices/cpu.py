"""`CpuDevice`: a device made of threads, so that the engine runs, and fails, as on a GPU.

Each stream is one worker thread with a FIFO queue. A launch returns before its work is done,
results really arrive later, and the two streams really run side by side: a missing wait shows as a
wrong token. Host staging and "device" tensors are separate memory here too, and a test may inject
random delays (`Chaos`).
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from megatron_async.devices.base import Device, Event, Stream
from megatron_async.devices.own_memory import CpuOwnMemory, OwnMemory

HANGING_S = 0.5
"""A stream that is left behind has so long to end."""
_current = threading.local()


def current_stream_name() -> str | None:
    """Name of the CPU stream whose thread this is, or None on a host thread."""
    return getattr(_current, "name", None)


@dataclass(frozen=True)
class Chaos:
    """Random delays before launched work, to shake out missing waits.

    Args:
        seed: of the delays.
        probability: share of work items that are delayed.
        max_delay_s: longest delay, seconds.
    """

    seed: int
    probability: float = 0.3
    max_delay_s: float = 0.002


class _Point:
    """One recording of an event (without a worker: an event that is not recorded). It is also the
    queue item that marks the point as reached."""

    always = True
    """Runs also after a fault."""

    def __init__(self, worker: _Worker | None) -> None:
        self.time_us = 0.0
        self._worker = worker
        self._is_reached = False
        self._failure: BaseException | None = None
        self._calls: deque[Callable[[], None]] = deque()

    def __call__(self) -> None:
        assert self._worker is not None, "it was recorded"
        self.time_us = time.perf_counter_ns() / 1e3
        self._failure = self._worker.failure
        self._is_reached = True
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # the thread of `tell` was faster
                return
            call()

    def query(self) -> bool:
        return self._is_reached

    def wait(self) -> None:
        self.wait_for(None)

    def wait_for(self, seconds: float | None) -> bool:
        """`Event.wait_for`; None waits for ever.

        The lock is of this call alone. Ctrl-C in a `threading.Event` may leave that locked, and the
        stream's thread would wait for it.
        """
        if not self._is_reached:
            until = threading.Lock()
            until.acquire()
            self.tell(until.release)
            if not until.acquire(timeout=-1 if seconds is None else seconds):
                return False
        if self._failure is not None:
            raise RuntimeError("work on the CPU stream failed") from self._failure
        return True

    def tell(self, call: Callable[[], None]) -> None:
        """`Event.tell`."""
        self._calls.append(call)
        if self._is_reached:  # perhaps only now: then one of the two threads finds `call`
            try:
                self._calls.remove(call)
            except ValueError:  # the stream's thread was faster
                return
            call()


class CpuEvent(Event):
    """An event whose earlier recordings live on for the streams that wait for them."""

    def __init__(self) -> None:
        self.point = _Point(None)

    def arm(self, worker: _Worker) -> _Point:
        """Begin a recording (host side): the item to be queued."""
        self.point = _Point(worker)
        return self.point

    def query(self) -> bool:
        return self.point.query()

    def wait(self) -> None:
        self.point.wait()

    def wait_for(self, seconds: float) -> bool:
        return self.point.wait_for(seconds)

    def tell(self, call: Callable[[], None]) -> bool:
        self.point.tell(call)
        return True

    def time_us(self) -> float:
        return self.point.time_us


class _Worker:
    """The thread of a stream. It holds no reference to the stream, so that the stream can die."""

    def __init__(self, name: str, chaos: Chaos | None) -> None:
        self.items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self._name = name
        self._chaos = chaos
        self._random = random.Random(f"{chaos.seed if chaos else 0}:{name}")
        self.thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        _current.name = self._name
        while (work := self.items.get()) is not None:
            self._maybe_delay()
            # As on a GPU, a fault is sticky: what was launched behind it must not run on its
            # leavings. Faults of a step's own making never come here (the controller holds them).
            if self.failure is None or getattr(work, "always", False):
                try:
                    work()
                except BaseException as failure:
                    self.failure = failure
            del work  # or the last closure would live until the next launch

    def _maybe_delay(self) -> None:
        if self._chaos is not None and self._random.random() < self._chaos.probability:
            time.sleep(self._random.random() * self._chaos.max_delay_s)


class CpuStream(Stream):
    """A FIFO queue and its worker thread."""

    def __init__(self, name: str, chaos: Chaos | None = None) -> None:
        self._worker = _Worker(name, chaos)
        # Also at interpreter exit: a thread inside torch while the interpreter goes down can crash.
        self._stop = weakref.finalize(self, _stop_worker, self._worker)

    def launch(self, work: Callable[[], None]) -> None:
        self._put(work)

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        self._put(event.arm(self._worker))

    def wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        self._put(event.point.wait)

    def _put(self, item: Callable[[], None]) -> None:
        if not self._stop.alive:
            # Nobody would ever run it, and a wait for it would never end.
            raise RuntimeError("the device is closed: make a new engine (or LLM) and use that.")
        self._worker.items.put(item)

    def close(self, wait: bool = True) -> None:
        """Run what is queued, then end the thread; without `wait`, leave it behind if it hangs."""
        if wait:
            self._stop()
        elif self._stop.detach() is not None:
            _stop_worker(self._worker, HANGING_S)


def _stop_worker(worker: _Worker, timeout_s: float | None = None) -> None:
    worker.items.put(None)
    if worker.thread is not threading.current_thread():
        worker.thread.join(timeout_s)


class CpuDevice(Device):
    """The engine's device where there is no GPU."""

    shares_cores = True

    def __init__(self, chaos: Chaos | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.compute: CpuStream = CpuStream("compute", chaos)
        self.copy: CpuStream = CpuStream("copy", chaos)
        # One more thread costs more than it gains here; tests with delays want it all the same.
        self.upload: CpuStream = self.compute if chaos is None else CpuStream("upload", chaos)

    def event(self, timing: bool = False) -> Event:
        return CpuEvent()

    def host_buffer(self, size: int, dtype: torch.dtype, is_zero: bool = True) -> Tensor:
        return torch.zeros(size, dtype=dtype) if is_zero else torch.empty(size, dtype=dtype)

    def own_memory(self, num_bytes: int, is_shared: bool = False) -> OwnMemory:
        return CpuOwnMemory(num_bytes, is_shared)

    def free_memory(self) -> int:
        return psutil.virtual_memory().available

    def fence(self) -> None:
        """Nothing to do: the host fills tensors at once."""

    def close(self, wait: bool = True) -> None:
        for stream in (self.upload, self.compute, self.copy):
            stream.close(wait)
