"""`OwnMemory`: addresses that stay, and memory behind them that comes and goes.

So captured steps, and all tensors at the addresses, stay valid while something else has the memory.
torch's allocators keep no address of what they have freed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from typing import override

import torch
from torch import Tensor

LARGE = 4 << 20
"""Bytes from which on large pages are asked for, as NumPy does."""


class OwnMemory(ABC):
    """A range of a device's addresses, which is freed with its last tensor.

    Attributes:
        tensor: uint8 `[bytes]`, always at the same address. While the memory is given back, nothing
            may touch it: on a GPU that is a fault, and a CPU would take memory again.
    """

    tensor: Tensor

    @abstractmethod
    def take(self) -> None:
        """Put memory behind the addresses, with zeros; if it is there, nothing happens.

        Raises:
            OutOfMemoryError: there is not so much.
        """

    @abstractmethod
    def give_back(self) -> int:
        """Give the memory to the system, contents included. Nothing that is launched may need it.

        Returns:
            bytes that this has freed, as measured.
        """

    @abstractmethod
    def share(self) -> int:
        """A new file descriptor of the memory, by which another process can map it; the caller
        closes it. Memory that is taken later may need another one.

        Raises:
            RuntimeError: it was not made to be shared, or is given back.
        """


class CpuOwnMemory(OwnMemory):
    """Pages of this process; or of a file without a name, which others can map.

    Args:
        num_bytes: size.
        is_shared: whether others can.
    """

    def __init__(self, num_bytes: int, is_shared: bool = False) -> None:
        size = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = -1
        if is_shared:
            self._file = os.memfd_create("megatron_async")
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
            self._pages = mmap.mmap(self._file, size)
        else:
            self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size >= LARGE:
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)[:num_bytes]

    @override
    def take(self) -> None:
        """Nothing to do: the system takes a page, of zeros, when it is first touched."""

    @override
    def give_back(self) -> int:
        before = self._resident()
        self._pages.madvise(mmap.MADV_REMOVE if self._file >= 0 else mmap.MADV_DONTNEED)
        return before - self._resident()

    @override
    def share(self) -> int:
        if self._file < 0:
            raise RuntimeError("this memory has no file: make it with is_shared=True.")
        return os.dup(self._file)

    def _resident(self) -> int:
        """Bytes of the pages that are in memory, as the system counts them."""
        pages = len(self._pages) // mmap.PAGESIZE
        is_there = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        address, size = ctypes.c_void_p(self.tensor.data_ptr()), ctypes.c_size_t(len(self._pages))
        if libc.mincore(address, size, is_there):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in is_there) * mmap.PAGESIZE
