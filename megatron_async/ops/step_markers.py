"""Kernels that do nothing but mark, by their names, where a part of a step ends.

A replayed graph runs no Python, so it pushes no NVTX range: in a timeline a captured step is a row
of kernels. These kernels divide the row. They are captured only with `InferenceConfig.nvtx`. None
starts before the kernel in front of it has ended, so with them a step takes a little longer.
"""

from __future__ import annotations

import triton


@triton.jit
def forward_pass_ends() -> None:
    """The kernels before it computed the logits."""


@triton.jit
def sampling_ends() -> None:
    """The kernels since `forward_pass_ends` chose the tokens."""


@triton.jit
def feed_back_ends() -> None:
    """The kernels since `sampling_ends` wrote the tokens where the next step and the host read."""


@triton.jit
def drafting_ends() -> None:
    """The kernels since `feed_back_ends` drafted tokens."""


MARKERS = {
    "forward_pass": forward_pass_ends,
    "sampling": sampling_ends,
    "feed_back": feed_back_ends,
    "drafting": drafting_ends,
}


def launch_marker(part: str) -> None:
    """Launch the kernel that ends a part of a step, on torch's current stream."""
    MARKERS[part][(1,)](num_warps=1)
