"""Memory that keeps its addresses: what it holds, and that its bytes really go back."""

import gc
import mmap
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megatron_async.devices import CpuDevice
from megatron_async.errors import ConfigurationError, OutOfMemoryError
from megatron_async.lab.virtual_device import VirtualDevice

MIB = 1 << 20


def test_bytes_go_back_and_addresses_stay() -> None:
    own = CpuDevice().own_memory(96 * MIB)
    address = own.tensor.data_ptr()
    assert not own.tensor[:: MIB // 2].any()
    own.tensor.fill_(7)
    before = psutil.Process().memory_info().rss
    freed = own.give_back()
    less = before - psutil.Process().memory_info().rss
    assert own.give_back() == 0, "it is gone"
    own.take()
    assert own.tensor.data_ptr() == address
    assert not own.tensor.any()
    assert freed == 96 * MIB
    assert less > 90 * MIB, "other threads may have taken some"


def test_what_was_never_touched_was_never_taken() -> None:
    own = CpuDevice().own_memory(8 * MIB + 5)
    assert own.tensor.shape == (8 * MIB + 5,)
    own.tensor[5] = 1
    # One page, or one of the large ones.
    assert mmap.PAGESIZE <= own.give_back() <= 2 * MIB
    assert CpuDevice().own_memory(0).tensor.shape == (0,)


def test_another_process_can_map_it_by_its_file_descriptor() -> None:
    own = CpuDevice().own_memory(2 * MIB, is_shared=True)
    own.tensor.fill_(3)
    file = own.share()
    try:
        with mmap.mmap(file, 2 * MIB) as theirs:
            assert theirs[MIB] == 3
            theirs[MIB] = 4
            assert own.tensor[MIB] == 4
            assert os.fstat(file).st_blocks * 512 == 2 * MIB
            assert own.give_back() == 2 * MIB
            assert os.fstat(file).st_blocks == 0, "not in the file either"
            assert theirs[MIB] == own.tensor[MIB] == 0
    finally:
        os.close(file)
    with pytest.raises(RuntimeError, match="is_shared=True"):
        CpuDevice().own_memory(5).share()


def test_it_lives_as_long_as_its_last_tensor() -> None:
    own = CpuDevice().own_memory(MIB, is_shared=True)
    part = own.tensor[:5]
    part.fill_(9)
    files = len(os.listdir("/proc/self/fd"))
    del own
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < files
    assert part.tolist() == [9] * 5


def test_a_device_without_it_says_so() -> None:
    with pytest.raises(ConfigurationError, match="VirtualDevice has no memory that keeps"):
        VirtualDevice.own_memory(object.__new__(VirtualDevice), 5)


# ---- The calls of CUDA's driver, where there is no GPU ------------------------------------------


class Calls(list[str]):
    """What the driver is asked for; the real one's structures, without a GPU. `failing` has its
    answer to a call."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.failing = driver, dict[str, Any]()

    def answer(self, name: str, *values: Any) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.append(name)
            return self.failing.get(name, self.driver.CUresult.CUDA_SUCCESS), *values

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    module = pytest.importorskip("megatron_async.devices.cuda_own_memory")
    calls, places = Calls(module.driver), torch.zeros(4 * MIB, dtype=torch.uint8)
    for name, *values in (
        ("cuDeviceGetAttribute", 1), ("cuMemGetAllocationGranularity", 2 * MIB),
        ("cuMemAddressReserve", places.data_ptr()), ("cuMemAddressFree",), ("cuMemCreate", 77),
        ("cuMemMap",), ("cuMemSetAccess",), ("cuMemUnmap",), ("cuMemRelease",),
        ("cuMemExportToShareableHandle", 5),
    ):  # fmt: skip
        monkeypatch.setattr(module.driver, name, calls.answer(name, *values))
    cuda = {
        "synchronize": lambda *_: calls.append("wait"), "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (2 * MIB * calls.count("cuMemRelease"), 0),
    }  # fmt: skip
    fake = SimpleNamespace(
        cuda=SimpleNamespace(**cuda), as_tensor=lambda *_, **__: places, device=torch.device
    )
    monkeypatch.setattr(module, "torch", fake)
    yield calls
    gc.collect()  # the range frees its addresses while the driver is not the real one


def cuda_memory(num_bytes: int = 3 * MIB, is_shared: bool = False) -> Any:
    from megatron_async.devices.cuda_own_memory import CudaOwnMemory

    return CudaOwnMemory(num_bytes, torch.device("cuda", 0), is_shared)


def test_calls_of_the_driver_in_their_order(calls: Calls) -> None:
    own = cuda_memory(is_shared=True)
    assert len(own.tensor) == 3 * MIB
    assert own._range.size == 4 * MIB, "whole pages"
    assert own._range.__cuda_array_interface__["shape"] == (4 * MIB,)
    mapped = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
    assert calls[-4:] == ["cuMemAddressReserve", *mapped]
    assert own.share() == 5
    del calls[:]
    own.take()
    assert calls == []
    assert own.give_back() == 2 * MIB
    assert calls == ["wait", "cuMemUnmap", "cuMemRelease"]
    with pytest.raises(RuntimeError, match="no file"):
        own.share()
    own.tensor.fill_(3)
    own.take()
    assert calls[3:] == mapped
    assert not own.tensor.any()
    del calls[:], own
    gc.collect()
    assert calls == ["wait", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]


def test_what_the_driver_refuses_leaves_nothing_behind(calls: Calls) -> None:
    own, results = cuda_memory(), calls.driver.CUresult
    own.give_back()
    calls.failing["cuMemCreate"] = results.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfMemoryError, match=r"no 0\.00391 GiB left .*buffer_size_gb"):
        own.take()
    calls.failing = {"cuMemSetAccess": results.CUDA_ERROR_INVALID_VALUE}
    del calls[:]
    with pytest.raises(RuntimeError, match=r"refused .* CUDA_ERROR_INVALID_VALUE"):
        own.take()
    assert calls[-2:] == ["cuMemUnmap", "cuMemRelease"]
    calls.failing = {}
    own.take()
    assert calls[-1] == "cuMemSetAccess"


def test_a_gpu_without_virtual_memory_is_told(calls: Calls, monkeypatch) -> None:
    monkeypatch.setattr(calls.driver, "cuDeviceGetAttribute", calls.answer("attribute", 0))
    with pytest.raises(ConfigurationError, match=r"cuda:0 has no virtual memory.*leave out"):
        cuda_memory()
