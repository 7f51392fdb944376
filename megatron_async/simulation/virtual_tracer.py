"""`VirtualTracer`: the engine's named ranges take the time of their stage from a virtual clock."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from megatron_async.devices import Device
from megatron_async.observe.tracer import Tracer
from megatron_async.simulation.cpu_times import CpuTimes
from megatron_async.simulation.virtual_device import VirtualClock


class VirtualTracer(Tracer):
    """A tracer whose ranges take the time of their stage from a virtual clock.

    The engine marks each stage with a named range, so it needs no hook of the simulator's.
    A stage's time is spent when its range begins: what is launched in it comes after it.

    Args:
        device: the engine's device.
        clock: moved on by each stage.
        times: of the stages.
    """

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
