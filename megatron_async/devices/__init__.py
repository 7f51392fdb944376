"""Streams, events and staging memory: all that differs between a GPU and no GPU.

docs/gpus.md is the guide.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from megatron_async.devices.base import Device, Event, Graph, Stream, makes_ordinary_tensors
from megatron_async.devices.cpu import Chaos, CpuDevice
from megatron_async.devices.cuda import CudaDevice
from megatron_async.errors import ConfigurationError

__all__ = [
    "Chaos",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "Event",
    "Graph",
    "Stream",
    "make_device",
    "makes_ordinary_tensors",
]


def resolve_device_name(name: str | torch.device | None) -> str:
    """`name` (or torch's device of that name), or the best device of this machine when it is None.

    Under torchrun "cuda" is the GPU of this process's LOCAL_RANK.

    Raises:
        ConfigurationError: an unknown name, or a GPU that is not there.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    name = str(name)
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or name == "cpu:":
        raise ConfigurationError(f"device={name!r} is unknown: use 'cpu', 'cuda' or 'cuda:N'.")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ConfigurationError(
                f"device={name!r}, but torch finds no usable GPU on this machine. Use "
                "device='cpu', or check the driver (nvidia-smi) and that torch is a CUDA build."
            )
        if index and int(index) >= count:
            raise ConfigurationError(
                f"device={name!r}, but this machine has {count} GPU(s): use cuda:0 to "
                f"cuda:{count - 1}, and no more processes a machine than it has GPUs."
            )
    return name


def make_device(name: str | None = None) -> Device:
    """The device called `name` ("cpu", "cuda", "cuda:N", or None for the best there is).

    A GPU is one object for the whole process, and its engines share its streams: graphs launched on
    a second compute stream lose what dependent launch gains (0.89 instead of 0.77 ms a step of a
    small model on an H200; measured, cause unknown).
    """
    kind, _, index = resolve_device_name(name).partition(":")
    if kind == "cpu":
        return CpuDevice()
    return _cuda_device(int(index) if index else torch.cuda.current_device())


@cache
def _cuda_device(index: int) -> CudaDevice:
    return CudaDevice(index)
