"""`Pools`: the large memory of an engine on its device, which a suspended engine can give back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from megatron_async.devices import Device, makes_ordinary_tensors
from megatron_async.devices.own_memory import OwnMemory
from megatron_async.errors import OutOfMemoryError

GIB = 1024**3
ALIGNMENT = 64
"""Bytes to which torch aligns memory on a CPU."""
ALIGNMENT_OF_WEIGHTS = 512
"""Bytes to which torch aligns memory on a GPU."""
PART = 256 << 20
"""Bytes of one host buffer: pinned ones are rounded up to powers of two."""
ROOM = 1 << 30
"""Bytes of weights that are moved at once."""


class Pools:
    """Tensors by name, given back and taken again together.

    Args:
        device: where they are.
        owner: of memory that keeps its addresses; None: memory is torch's, and each time another.

    Attributes:
        is_there: whether the memory is not given back.
    """

    def __init__(self, device: torch.device, owner: Device | None = None) -> None:
        self.device, self._owner = device, owner
        self._tensors: dict[str, Tensor] = {}
        self._own: dict[str, OwnMemory] = {}
        self._sizes: dict[str, int] = {}
        self._copies: dict[str, list[Tensor]] = {}
        self.is_there = True

    @property
    def keeps_addresses(self) -> bool:
        """Whether tensors that are taken again are at their old addresses."""
        return self._owner is not None

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, also while they are given back."""
        return sum(self._sizes.values())

    @makes_ordinary_tensors
    def zeros(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor `size` of that name: made of zeros, or, where addresses are kept, the one
        there is."""
        if name in self._own:
            return self._tensors[name]
        self._sizes[name] = num_bytes = math.prod(size) * dtype.itemsize
        if self._owner is not None:
            own = self._own[name] = self._owner.own_memory(num_bytes)
            tensor = own.tensor.view(dtype).view(size)
        else:
            tensor = _zeros(size, dtype, self.device)
        self._tensors[name] = tensor
        return tensor

    def release(self) -> int:
        """Give the memory back, contents included; no launched work may need it.

        Returns:
            bytes: measured where addresses are kept, else those of the tensors.
        """
        self.is_there = False
        if self.keeps_addresses:
            return sum(own.give_back() for own in self._own.values())
        freed = sum(tensor.nbytes for tensor in self._tensors.values())
        self._tensors.clear()
        return freed

    def take(self) -> None:
        """Put memory behind the kept addresses again; `zeros` makes the tensors anew elsewhere.

        Raises:
            OutOfMemoryError: not all of it could be had, and none is kept.
        """
        try:
            for own in self._own.values():
                own.take()
        except BaseException:
            self.release()
            raise
        self.is_there = True

    @makes_ordinary_tensors
    def save(self, device: Device, keeps: bool = True) -> None:
        """Copy all contents to the host, for `restore`, and wait for it; unless `keeps`, forget
        what was copied before, too.

        Raises:
            OutOfMemoryError: the host has less memory than that.
        """
        self._copies = {}
        if not keeps:
            return
        free = psutil.virtual_memory().available
        if self.num_bytes > free:
            raise OutOfMemoryError(
                f"a copy on the host takes {self.num_bytes / GIB:.3g} GiB, but {free / GIB:.3g} "
                "GiB is free there: suspend without a copy, or free memory."
            )
        self._copies = {
            name: [device.host_buffer(len(part), torch.uint8, False) for part in _parts(tensor)]
            for name, tensor in self._tensors.items()
        }
        device.compute.launch(partial(self._copy, True))
        device.wait()

    def restore(self, device: Device) -> None:
        """Bring the saved contents back, if there are any, behind `take` and `zeros`; waits."""
        if self._copies:
            device.compute.launch(partial(self._copy, False))
            device.wait()
            self._copies = {}

    @torch.no_grad()
    def _copy(self, is_saving: bool) -> None:
        for name, buffers in self._copies.items():
            for part, buffer in zip(_parts(self._tensors[name]), buffers, strict=True):
                to, source = (buffer, part) if is_saving else (part, buffer)
                to.copy_(source, non_blocking=True)


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    return tensor.view(-1).view(torch.uint8).split(PART)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros `size`. On a CPU the system zeroes a page when it is first touched.

    `torch.zeros` would write the whole pool, half a second for 1 GiB, of which most engines use a
    few blocks.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    count = math.prod(size) * dtype.itemsize
    memory = np.zeros(count + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[first : first + count]).view(dtype).view(size)


def move_weights(model: nn.Module, device: Device) -> Pools:
    """Move the parameters of a model, which are not written yet, to memory that keeps its
    addresses; `ROOM` bytes at a time, so that there is never much of both."""
    pools, rooms, end = Pools(device.torch_device, device), list[list[nn.Parameter]](), ROOM
    for parameter in model.parameters():
        if end + parameter.nbytes > ROOM:
            rooms.append([])
            end = 0
        rooms[-1].append(parameter)
        end += _aligned(parameter.nbytes)
    for number, parameters in enumerate(rooms):
        size = sum(_aligned(parameter.nbytes) for parameter in parameters)
        room, first = pools.zeros(f"weights {number}", (size,), torch.uint8), 0
        for parameter in parameters:
            place = room[first : first + parameter.nbytes]
            parameter.data = place.view(parameter.dtype).view(parameter.shape)
            first += _aligned(parameter.nbytes)
        device.trim()
    return pools


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_OF_WEIGHTS) * ALIGNMENT_OF_WEIGHTS
