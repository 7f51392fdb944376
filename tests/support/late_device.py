"""`LateDevice`: a CPU device without threads that is as slow as its events allow.

Launched work runs only when the host waits for later work, and then only as much as that wait
needs. A copy reads its host buffer at the last moment. Samples arrive at the last moment. A step
runs after everything that the host did since the step's launch. So a change that the host
makes too early, and an order that no event enforces, goes wrong in every run and not once in a
while. A failure can be repeated and shrunk. `LateDevice.run` lets a stream get on, as a faster
device would. Some streams may be eager: they do their work as soon as they can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import psutil
import torch
from torch import Tensor

from megatron_async.devices import Device
from megatron_async.devices.base import Event, Stream
from megatron_async.devices.own_memory import CpuOwnMemory, OwnMemory


class LateStream(Stream):
    """Launched work, in order, of which the first `done` items have run."""

    def __init__(self, lock: threading.RLock, is_eager: bool) -> None:
        self._lock = lock
        self._is_eager = is_eager
        self._work: dict[int, Callable[[], None]] = {}
        self._launched = 0
        self._failure: BaseException | None = None
        self.done = 0

    @property
    def pending(self) -> int:
        """Items that have not run."""
        return self._launched - self.done

    def launch(self, work: Callable[[], None]) -> None:
        self._work[self._launched] = work
        self._launched += 1
        if self._is_eager:
            self.run_to(self._launched)

    def record(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        event.place(self, self._launched)

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self.launch(event.recorded().wait)

    def run_to(self, position: int) -> None:
        """Run the items before `position` that have not run."""
        with self._lock:
            while self.done < position:
                work = self._work.pop(self.done)
                self.done += 1
                if self._failure is None:  # as on a GPU, a fault is sticky
                    try:
                        work()
                    except BaseException as failure:
                        self._failure = failure
            if self._failure is not None:
                raise RuntimeError("work on the late stream failed") from self._failure


class LateEvent(Event):
    """A place in a stream's order. What waits for it waits for the place that it had then, as on a
    GPU."""

    def __init__(self, stream: LateStream | None = None, position: int = 0) -> None:
        self._stream, self._position = stream, position

    def place(self, stream: LateStream, position: int) -> None:
        """Record it: after the first `position` items of `stream`."""
        self._stream, self._position = stream, position

    def recorded(self) -> LateEvent:
        """A copy that stays where this event is now."""
        return LateEvent(self._stream, self._position)

    def query(self) -> bool:
        return self._stream is None or self._stream.done >= self._position

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.run_to(self._position)

    def wait_for(self, seconds: float) -> bool:
        self.wait()
        return True

    def time_us(self) -> float:
        assert self.query(), "asked for the time of an event that has not been reached"
        return time.perf_counter_ns() / 1e3


class LateDevice(Device):
    """Three streams whose work runs when the host waits for it. Those that `eager` names run work
    as it is launched, and with it what it waits for."""

    def __init__(self, eager: Collection[str] = ()) -> None:
        self.torch_device = torch.device("cpu")
        # One lock: `async_step` waits on a thread of its own.
        lock = threading.RLock()
        self.compute: LateStream = LateStream(lock, "compute" in eager)
        self.copy: LateStream = LateStream(lock, "copy" in eager)
        self.upload: LateStream = LateStream(lock, "upload" in eager)

    def run(self, stream: LateStream, items: int) -> None:
        """Let `stream` get on by at most so many items (and others, as far as it waits for
        them)."""
        stream.run_to(stream.done + min(items, stream.pending))

    def event(self, timing: bool = False) -> Event:
        return LateEvent()

    def host_buffer(self, size: int, dtype: torch.dtype, is_zero: bool = True) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def own_memory(self, num_bytes: int, is_shared: bool = False) -> OwnMemory:
        return CpuOwnMemory(num_bytes, is_shared)

    def free_memory(self) -> int:
        return psutil.virtual_memory().available

    def fence(self) -> None:
        """Nothing to do: the host fills tensors at once."""

    def close(self, wait: bool = True) -> None:
        for stream in (self.upload, self.compute, self.copy):
            self.run(stream, stream.pending)
