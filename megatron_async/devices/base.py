"""What the engine needs of a device: streams, events and host staging memory.

The two implementations are `CudaDevice` and `CpuDevice`; the engine cannot tell them apart.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Protocol

import torch
from torch import Tensor

from megatron_async.devices.own_memory import OwnMemory
from megatron_async.errors import ConfigurationError


class Event(ABC):
    """A point in a stream's order. Recorded again, it is another point for later questions
    and waits: a stream that was told to wait before still waits for the earlier one."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the work before the point is done."""

    @abstractmethod
    def wait(self) -> None:
        """Block the calling host thread until the work before the point is done."""

    @abstractmethod
    def wait_for(self, seconds: float) -> bool:
        """Wait for at most so many seconds; returns whether the point is reached."""

    def tell(self, call: Callable[[], None]) -> bool:
        """Have `call` called once, on any thread, when the point is reached (at once, if it is).

        Returns:
            whether that will be done: False where an event can only be asked (`query`).
        """
        return False

    @abstractmethod
    def time_us(self) -> float:
        """When the point was reached, microseconds on `time.perf_counter_ns`'s clock.

        Only for events made with `timing=True`, and only once reached.
        """

    def us_since(self, start: Event) -> float:
        """Microseconds from `start` to this point, both of one device, made with `timing=True` and
        reached."""
        return self.time_us() - start.time_us()


class Stream(ABC):
    """An in-order queue of device work."""

    @abstractmethod
    def launch(self, work: Callable[[], None]) -> None:
        """Enqueue `work`; it runs after everything launched here before, and never blocks the host.

        On a GPU `work` is called at once and enqueues kernels; on a CPU it is called later, on the
        stream's own thread. So it must not read anything that the host goes on to change.
        """

    @abstractmethod
    def record(self, event: Event) -> None:
        """Put the event's point here: after all work launched so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Hold back work launched here from now on until the event is reached; the host goes on."""


class Graph(Protocol):
    """Captured device work."""

    def replay(self) -> None:
        """Run it again, on the same addresses; call it inside launched work."""
        ...


class Device(ABC):
    """A compute device.

    Attributes:
        torch_device: where its tensors live.
        compute: the one stream on which steps run; a total order: a step that is launched later
            runs later.
        copy: the stream that carries to the host what steps do not write there themselves.
        upload: the stream that carries bookkeeping to the device; it may be `compute`.
        captures_graphs: whether `capture` works here.
        shares_cores: whether steps run on the cores that the engine's thread needs.
    """

    torch_device: torch.device
    compute: Stream
    copy: Stream
    upload: Stream
    captures_graphs = False
    shares_cores = False

    @property
    def name(self) -> str:
        """What it is: a GPU's exact name, else the type of its memory."""
        return self.torch_device.type

    @abstractmethod
    def event(self, timing: bool = False) -> Event:
        """A new event, not yet recorded."""

    def now_us(self) -> float:
        """The host's time, microseconds on `time.perf_counter_ns`'s clock."""
        return time.perf_counter_ns() / 1e3

    @abstractmethod
    def host_buffer(self, size: int, dtype: torch.dtype, is_zero: bool = True) -> Tensor:
        """Host memory, `[size]`, from which copies do not block, and which launched work may write
        (pinned, on a GPU); unless `is_zero`, with any contents."""

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that a new allocation could get."""

    def memory_in_use(self) -> int:
        """Bytes that are taken on the device and not given back on demand; 0 where nobody asks."""
        return 0

    def release_unused(self) -> None:
        """Give memory that nothing uses back to the system. Nothing to do where freed memory goes
        back by itself."""
        return

    def trim(self) -> None:
        """Release unused memory, and what graphs used, of which none is left."""
        self.release_unused()

    def own_memory(self, num_bytes: int, is_shared: bool = False) -> OwnMemory:
        """Memory whose addresses stay while it is given back; `is_shared`: it has file descriptors.

        Raises:
            ConfigurationError: there is none on this device.
            OutOfMemoryError: there is not so much.
        """
        raise ConfigurationError(f"{type(self).__name__} has no memory that keeps its addresses.")

    def wait(self) -> None:
        """Until all that is launched is done."""
        done = self.event()
        for stream in (self.upload, self.compute, self.copy):
            stream.record(done)
            done.wait()

    @abstractmethod
    def fence(self) -> None:
        """Order all streams after tensors that the host has made or filled so far."""

    def caller_event(self) -> Event | None:
        """The point that the calling thread's own device work has come to; None where such work is
        done when its call returns."""
        return None

    def caller_waits(self, event: Event | None = None) -> None:
        """Hold the calling thread's own device work back until the event is reached; None: what is
        launched on `compute` so far."""
        self._event_of(event).wait()

    def keep(self, tensor: Tensor) -> None:
        """Let memory that others have made, and free, be taken again only when all is done that
        `compute` has launched by then. Nothing to do where work holds its tensors."""
        return

    def _event_of(self, event: Event | None) -> Event:
        if event is None:
            event = self.event()
            self.compute.record(event)
        return event

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture `work` as a graph on the compute stream.

        Work of this kind has run before: memory that is made and filled at the first use of a
        library would be filled by this graph's replays alone. Kernels may be new; they are compiled
        and loaded meanwhile.

        Raises:
            RuntimeError: the device captures no graphs (`captures_graphs` is False).
        """
        raise RuntimeError(f"{type(self).__name__} captures no graphs")

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor at the same place. Of the memory of a graph (`capture`) it keeps nothing, so
        that later graphs use it too."""
        return tensor

    @abstractmethod
    def close(self, wait: bool = True) -> None:
        """Finish what is launched and free threads; the device is not used again.

        Args:
            wait: False where what is launched may never end, because another rank is lost.
        """


def makes_ordinary_tensors[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of what allocates memory that outlives its call: neither the memory nor what is
    done to it there depends on the caller's autograd mode.

    Tensors made under `torch.inference_mode()` may be changed under it only, and it is a mode of
    the thread. What steps write is written by a stream's own thread on a CPU, by the caller's on a
    GPU, and an engine may be made in one mode and run in another: all of that is allowed for
    ordinary tensors, at no cost in a step.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call
