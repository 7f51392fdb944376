"""Programmatic dependent launch: a kernel is set up while the one before it still runs.

A small kernel of a captured step costs about a microsecond before its first instruction. On Hopper
and later a kernel may be launched early and wait itself for the one before it (CUDA Programming
Guide, "Programmatic Dependent Launch and Synchronization"). Each kernel here first waits, then lets
its successor start; what lies before the wait may only read what no kernel of the step writes
(weights).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER = 9
"""First major compute capability with dependent launch."""


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Keyword arguments of a kernel launch: `overlap`, a constexpr of the kernel, and Triton's own
    option where the device has dependent launch."""
    if tensor.is_cuda and _supports(tensor.device.index):
        return {"overlap": True, "launch_pdl": True}
    return {"overlap": False}


@lru_cache
def _supports(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] >= HOPPER


@triton.jit
def wait_for_previous(overlap: tl.constexpr) -> None:
    """Wait until the kernel before this one is done and its writes are visible; then allow the
    next one to start, which waits in turn."""
    if overlap:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
