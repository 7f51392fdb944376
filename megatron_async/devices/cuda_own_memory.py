"""`CudaOwnMemory`: `OwnMemory` of a GPU, by the virtual memory of CUDA's driver.

The calls and their order are the driver API's own manual's (CUDA 13, "Virtual Memory Management").
"""

from __future__ import annotations

import weakref
from typing import Any, override

import torch
from cuda.bindings import driver  # type: ignore[import-untyped]

from megatron_async.devices.own_memory import OwnMemory
from megatron_async.errors import ConfigurationError, OutOfMemoryError

GIB = 1024**3
FILE_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class CudaOwnMemory(OwnMemory):
    """Memory of one GPU, in its large pages (2 MiB on those of today).

    Args:
        num_bytes: size.
        device: the GPU.
        is_shared: whether its memory has file descriptors.

    Raises:
        ConfigurationError: this GPU or its driver has no virtual memory, or none to be shared.
        OutOfMemoryError: there is not so much memory.
    """

    def __init__(self, num_bytes: int, device: torch.device, is_shared: bool = False) -> None:
        torch.cuda.synchronize(device)  # sync-ok: at a start; it makes the GPU's context
        self._device, self._is_shared = device, is_shared
        attributes = driver.CUdevice_attribute
        needed = {"virtual": attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED}
        if is_shared:
            needed["shared virtual"] = (
                attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            )
        for kind, attribute in needed.items():
            if not _checked(driver.cuDeviceGetAttribute(attribute, device.index)):
                raise ConfigurationError(
                    f"{device} has no {kind} memory, by its driver: leave out enable_sleep_mode "
                    "(on Megatron's engine: static_kv_memory_pointers)."
                )
        unit = _checked(
            driver.cuMemGetAllocationGranularity(
                self._wanted(),
                driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )
        self._range = _Range(-(-max(num_bytes, 1) // unit) * unit, device)
        self._map()
        # Only addresses with memory tell torch their device.
        self.tensor = torch.as_tensor(self._range, device=device)[:num_bytes]
        self.tensor.zero_()

    @override
    def take(self) -> None:
        if not self._range.handles:
            self._map()
            self.tensor.zero_()

    @override
    def give_back(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        _unmap(self._range.address, self._range.size, self._range.handles, self._device)
        return torch.cuda.mem_get_info(self._device)[0] - free

    @override
    def share(self) -> int:
        if not self._is_shared or not self._range.handles:
            raise RuntimeError("this memory has no file: make it with is_shared=True, and take it.")
        handle = self._range.handles[0]
        return int(_checked(driver.cuMemExportToShareableHandle(handle, FILE_DESCRIPTOR, 0)))

    def _wanted(self) -> Any:
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self._device.index
        if self._is_shared:
            wanted.requestedHandleTypes = FILE_DESCRIPTOR
        return wanted

    def _map(self) -> None:
        size, wanted = self._range.size, self._wanted()
        torch.cuda.empty_cache()  # what torch's allocator holds unused is ours to take as well
        handle = _checked(driver.cuMemCreate(size, wanted, 0), f"{size / GIB:.3g} GiB")
        access = driver.CUmemAccessDesc()
        access.location = wanted.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            _checked(driver.cuMemMap(self._range.address, size, 0, handle, 0))
            _checked(driver.cuMemSetAccess(self._range.address, size, [access], 1))
        except BaseException:
            driver.cuMemUnmap(self._range.address, size)  # refused where it was not mapped
            driver.cuMemRelease(handle)
            raise
        self._range.handles.append(handle)


class _Range:
    """Reserved addresses, and the handle of the memory behind them, if there is any. Tensors hold
    it, and it is freed with the last of them."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.address = int(_checked(driver.cuMemAddressReserve(size, 0, 0, 0)))
        self.handles: list[Any] = []
        freeing = weakref.finalize(self, _free, self.address, size, self.handles, device)
        freeing.atexit = False  # the process's end frees all

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.size,), "typestr": "|u1", "data": data, "version": 2}


def _unmap(address: int, size: int, handles: list[Any], device: torch.device) -> None:
    if handles:
        torch.cuda.synchronize(device)  # sync-ok: no step runs; else it would fault
        _checked(driver.cuMemUnmap(address, size))
        _checked(driver.cuMemRelease(handles.pop()))


def _free(address: int, size: int, handles: list[Any], device: torch.device) -> None:
    _unmap(address, size, handles, device)
    _checked(driver.cuMemAddressFree(address, size))


def _checked(answer: tuple[Any, ...], wanted: str = "") -> Any:
    """The value of a driver's call."""
    error, *values = answer
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise OutOfMemoryError(
            f"the GPU has no {wanted or 'memory'} left for memory that keeps its addresses: free "
            "memory there, or give the KV cache less (buffer_size_gb)."
        )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA's driver refused a call for virtual memory: {error.name}")
    return values[0] if values else None
