"""`VirtualDevice`: a device without memory or arithmetic, on a clock that only moves when told.

Its streams keep the order and the events of a real device, so that the engine's own launching and
waiting run as they are; only time is made up. Tensors go to torch's "meta" device: shapes without
memory, so that the KV pool of any model fits any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron_async.devices import Device, Event, Stream
from megatron_async.lab.device_times import CpuTimes
from megatron_async.observe.tracer import Tracer

UNLIMITED = 2**62
"""Bytes; what a device without memory has free."""


class VirtualClock:
    """The host's time, microseconds from 0."""

    def __init__(self) -> None:
        self._now_us = 0.0

    @property
    def now_us(self) -> float:
        """The present."""
        return self._now_us

    def spend(self, microseconds: float) -> None:
        """The host works for so long."""
        self._now_us += microseconds

    def wait_until(self, time_us: float) -> None:
        """The host waits; not at all for a time that has passed."""
        self._now_us = max(self._now_us, time_us)


class RealClock(VirtualClock):
    """The time of `time.perf_counter`: the host really waits for a device that computes nothing."""

    @property
    def now_us(self) -> float:
        return 1e6 * time.perf_counter()

    def spend(self, microseconds: float) -> None:
        """The host works for as long as it does."""

    def wait_until(self, time_us: float) -> None:
        time.sleep(max(time_us - self.now_us, 0.0) / 1e6)


class VirtualEvent(Event):
    """A point in a virtual stream's order: the time at which its stream gets there."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.reached_us = 0.0

    def query(self) -> bool:
        return self.reached_us <= self._clock.now_us

    def wait(self) -> None:
        self._clock.wait_until(self.reached_us)

    def wait_for(self, seconds: float) -> bool:
        self.wait()
        return True

    def time_us(self) -> float:
        return self.reached_us


class VirtualStream(Stream):
    """An in-order queue as a single number: when the work launched so far will be done.

    Launched work is called at once, as a GPU's launches are, and says by `spend` how long it takes.

    Attributes:
        free_us: when all work launched so far is done.
        busy_us: time spent in work so far.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.free_us = 0.0
        self.busy_us = 0.0

    def launch(self, work: Callable[[], None]) -> None:
        self.free_us = max(self.free_us, self._clock.now_us)
        work()

    def record(self, event: Event) -> None:
        assert isinstance(event, VirtualEvent)
        event.reached_us = max(self.free_us, self._clock.now_us)

    def wait(self, event: Event) -> None:
        assert isinstance(event, VirtualEvent)
        self.free_us = max(self.free_us, event.reached_us)

    def spend(self, microseconds: float) -> None:
        """Inside launched work: it takes so long."""
        self.free_us += microseconds
        self.busy_us += microseconds


class VirtualDevice(Device):
    """A device of which only the clock is left.

    Args:
        captures_graphs: pad steps to captured shapes, as on a GPU.
        shares_cores: stand for a CPU.
        clock: the host's time; None: one that only moves when told.

    Attributes:
        clock: the host's time.
    """

    def __init__(
        self,
        captures_graphs: bool = False,
        clock: VirtualClock | None = None,
        shares_cores: bool = False,
    ) -> None:
        self.torch_device = torch.device("meta")
        self.captures_graphs, self.shares_cores = captures_graphs, shares_cores
        self.clock = VirtualClock() if clock is None else clock
        self.compute: VirtualStream = VirtualStream(self.clock)
        self.copy: VirtualStream = VirtualStream(self.clock)
        self.upload: VirtualStream = VirtualStream(self.clock)

    def event(self, timing: bool = False) -> Event:
        return VirtualEvent(self.clock)

    def host_buffer(self, size: int, dtype: torch.dtype, is_zero: bool = True) -> Tensor:
        return torch.zeros(size, dtype=dtype) if is_zero else torch.empty(size, dtype=dtype)

    def now_us(self) -> float:
        return self.clock.now_us

    def free_memory(self) -> int:
        return UNLIMITED

    def fence(self) -> None:
        """Nothing to do: there is nothing to order."""

    def close(self, wait: bool = True) -> None:
        """Nothing to do: there are no threads."""


class VirtualTracer(Tracer):
    """A tracer whose ranges take the time of their stage from a virtual clock.

    The engine marks each stage with a named range, so it needs no hook of the simulator's.
    A stage's time is spent when its range begins: what is launched in it comes after it."""

    def __init__(self, device: Device, clock: VirtualClock, times: CpuTimes) -> None:
        super().__init__(device)
        stages = {
            "prepare_step": times.prepare_us,
            "launch_step": times.launch_us,
            "update_requests": times.resolve_us,
        }
        self._ranges = {name: _VirtualRange(clock, us) for name, us in stages.items()}
        self._others = _VirtualRange(clock, 0.0)

    def range(self, name: str, step: int = -1) -> Any:
        """A context manager that takes the time of stage `name`."""
        return self._ranges.get(name, self._others)


class _VirtualRange:
    """Stateless, so that one object serves all steps."""

    def __init__(self, clock: VirtualClock, microseconds: float) -> None:
        self._clock, self._microseconds = clock, microseconds

    def __enter__(self) -> None:
        self._clock.spend(self._microseconds)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None
