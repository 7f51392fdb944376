"""Kernel timelines of an engine's steps, from torch.profiler, for the gap report."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_async.profiling.gap_report import DeviceActivity

FIRST_KERNEL = "_unpack_kernel"
"""Part of the name of the kernel that every step begins with (`device_state/unpack_step.py`)."""


def profile_device(run: Callable[[], None]) -> profile:
    """Run steps under torch.profiler, kernels of graph replays included, and wait for the GPU.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("profiling kernels needs a CUDA device, and torch finds none.")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return profiler


def device_activities(profiler: profile) -> list[DeviceActivity]:
    """Kernels and copies of a finished profile."""
    return [
        DeviceActivity(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
