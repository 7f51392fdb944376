"""What rows the loops of a CPU take, others being the references', and threads that share rows.

A shared loop holds no lock of Python's. (Products and layers have threads of their own that stay
awake: `helpers.py`.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch
from torch import Tensor


def serves(*tensors: Tensor | None) -> bool:
    """Whether the loops take these tensors."""
    return all(
        tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
        for tensor in tensors
    )


def serves_gated(y: Tensor, z: Tensor, weight: Tensor) -> bool:
    """Whether the loops of gated norms take rows y, gates z and a weight."""
    return (
        y.shape == z.shape
        and y.dtype == z.dtype == torch.float32
        and y.stride(1) == z.stride(1) == 1
        and serves(weight)
    )


@cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    """Threads beside the caller's."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="rows")


# A forked process has no threads but the one that forked.
os.register_at_fork(after_in_child=_helpers.cache_clear)


def run_shares(loop: Callable[[int, int], None], shares: Sequence[tuple[int, int]]) -> None:
    """Call a loop with each share, at most as many as torch has threads; the caller's thread does
    the first. An error of any is raised once all are done."""
    own, *others = shares
    helpers = _helpers(torch.get_num_threads()) if others else None
    running = [helpers.submit(loop, *share) for share in others] if helpers else []
    try:
        loop(*own)
    finally:
        wait(running)
    for share in running:
        share.result()
