"""`CudaDevice`: CUDA streams, events and pinned memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from megatron_async.devices.base import Device, Event, Graph, Stream
from megatron_async.devices.own_memory import OwnMemory


class CudaEvent(Event):
    """A CUDA event; `origin` maps its clock to the host's when it is timed."""

    def __init__(self, timing: bool, origin: _ClockOrigin | None) -> None:
        self.event = torch.cuda.Event(enable_timing=timing)
        self._origin = origin

    def query(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()  # sync-ok: the one wait in resolve

    def wait_for(self, seconds: float) -> bool:
        # It spins, as `synchronize` does by default.
        end = time.perf_counter() + seconds
        while not self.event.query():
            if time.perf_counter() > end:
                return False
        return True

    def time_us(self) -> float:
        assert self._origin is not None, "time_us of an event made without timing=True"
        return self._origin.host_us + self._origin.event.elapsed_time(self.event) * 1e3

    def us_since(self, start: Event) -> float:
        # Elapsed times are float32: since an origin 16 seconds ago they come in steps of 1
        # microsecond, and of 250 after an hour.
        assert isinstance(start, CudaEvent)
        return start.event.elapsed_time(self.event) * 1e3


class _ClockOrigin:
    """One instant known on both clocks."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        stream.synchronize()
        self.event.record(stream)
        self.event.synchronize()
        self.host_us = time.perf_counter_ns() / 1e3


class CudaStream(Stream):
    """A CUDA stream; launched work is called at once and enqueues kernels on it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def launch(self, work: Callable[[], None]) -> None:
        # torch's own context manager of a stream, `torch.cuda.stream(...)`, takes Python 7
        # microseconds; this one is compiled.
        with self.stream:
            work()

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.event.record(self.stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice(Device):
    """One GPU. Make it with `make_device`, which keeps one object for each."""

    captures_graphs = True

    def __init__(self, index: int | None = None) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.compute: CudaStream = CudaStream(self.torch_device)
        self.copy: CudaStream = CudaStream(self.torch_device)
        self.upload: CudaStream = CudaStream(self.torch_device)
        self._origin: _ClockOrigin | None = None
        self._graph_pool: Any = None
        self._pool_graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self.fence()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def event(self, timing: bool = False) -> Event:
        if timing and self._origin is None:
            self._origin = _ClockOrigin(self.compute.stream)
        return CudaEvent(timing, self._origin if timing else None)

    def host_buffer(self, size: int, dtype: torch.dtype, is_zero: bool = True) -> Tensor:
        make = torch.zeros if is_zero else torch.empty
        return make(size, dtype=dtype, pin_memory=True)

    def own_memory(self, num_bytes: int, is_shared: bool = False) -> OwnMemory:
        # Only where it is asked for: the driver's bindings come with a CUDA build of torch.
        from megatron_async.devices.cuda_own_memory import CudaOwnMemory

        return CudaOwnMemory(num_bytes, self.torch_device, is_shared)

    def free_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        # Memory that torch's allocator holds unused is ours to take as well.
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(
            self.torch_device
        )
        return free + unused

    def release_unused(self) -> None:
        torch.cuda.empty_cache()

    def trim(self) -> None:
        self._graph_pool = None  # other engines' graphs keep the old one
        self.release_unused()

    def memory_in_use(self) -> int:
        self.release_unused()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free

    def capture(self, work: Callable[[], None]) -> Graph:
        # One pool for all graphs: they replay one after another, so they may share their memory.
        # A pool whose graphs are gone must not be captured into again: torch refuses it while a
        # tensor of that pool is alive.
        if self._graph_pool is None or not self._pool_graphs:
            self._graph_pool = torch.cuda.graph_pool_handle()
            self._pool_graphs = WeakSet()
        graph = torch.cuda.CUDAGraph()
        # torch's own context manager, `torch.cuda.graph`, also waits for the device and gives its
        # unused memory back, at each of hundreds of graphs. "relaxed": a kernel that is new is
        # loaded meanwhile, and NCCL's watchdog thread asks for events of its own.
        with self.compute.stream:
            graph.capture_begin(pool=self._graph_pool, capture_error_mode="relaxed")
            try:
                work()
            finally:
                graph.capture_end()
        self._pool_graphs.add(graph)
        return graph

    def alias(self, tensor: Tensor) -> Tensor:
        if not tensor.is_contiguous():
            return tensor
        size = tensor.numel() * tensor.element_size()
        interface = {"shape": (size,), "typestr": "|u1", "data": (tensor.data_ptr(), False)}
        place = SimpleNamespace(__cuda_array_interface__={**interface, "version": 2})
        return torch.as_tensor(place, device=tensor.device).view(tensor.dtype).view(tensor.shape)

    def fence(self) -> None:
        # Weights and caches are made on the default stream; steps read them on ours.
        default = torch.cuda.default_stream(self.torch_device)
        self.compute.stream.wait_stream(default)
        self.copy.stream.wait_stream(default)
        self.upload.stream.wait_stream(default)

    def caller_event(self) -> Event:
        event = CudaEvent(False, None)
        event.event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def caller_waits(self, event: Event | None = None) -> None:
        event = self._event_of(event)
        assert isinstance(event, CudaEvent)
        torch.cuda.current_stream(self.torch_device).wait_event(event.event)

    def keep(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self.compute.stream)

    def close(self, wait: bool = True) -> None:
        if wait:
            torch.cuda.synchronize(self.torch_device)
