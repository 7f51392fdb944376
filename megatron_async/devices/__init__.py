"""Devices: the same engine with and without a GPU."""

from __future__ import annotations

import torch

from megatron_async.devices.base import Device, Event, Graph, Stream
from megatron_async.devices.cpu import Chaos, CpuDevice
from megatron_async.devices.cuda import CudaDevice
from megatron_async.errors import ConfigurationError

__all__ = ["Chaos", "CpuDevice", "CudaDevice", "Device", "Event", "Graph", "Stream", "make_device"]


def resolve_device_name(name: str | None) -> str:
    """`name`, or the best device of this machine when it is None.

    Raises:
        ConfigurationError: an unknown name, or a GPU that is not there.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
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
                f"cuda:{count - 1}."
            )
    return name


def make_device(name: str | None = None) -> Device:
    """The device called `name` ("cpu", "cuda", "cuda:N", or None for the best there is)."""
    kind, _, index = resolve_device_name(name).partition(":")
    return CpuDevice() if kind == "cpu" else CudaDevice(int(index) if index else None)
