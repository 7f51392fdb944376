"""Programmatic dependent launch: a kernel is set up while the one before it still runs.

A small kernel of a captured step costs about a microsecond before its first instruction. On Hopper
and later a kernel may be launched early and wait itself for the one before it (CUDA Programming
Guide, "Programmatic Dependent Launch and Synchronization"). Every program of every kernel waits,
and none writes before its wait, but for one kernel (below). So when a kernel has completed, all
earlier kernels have. Therefore a kernel may let its successor start before its own wait.

Code before a kernel's wait may read weights, and what is written before a step's first layer: rows,
positions, schedules, states of earlier steps. The embedding's kernel lets its successor start only
after its own wait, when all that is there; so it must not be made to let start earlier. The flush
of recurrent states lets nobody start before its end: a later stage of a pipeline has no embedding
behind it. What a layer writes may be read before a wait only if a kernel between lets its successor
start after its own wait (`is_settled` of `ops/attention/decode_attention.py`).

One kernel works before its wait: attention of decode rows beside the prompts' (`is_beside`,
there). Only the prompts' kernel may still run then, and neither touches what the other writes.
Their end stays in order, since the last programs wait.
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
def wait_for_previous(overlap: tl.constexpr, early: tl.constexpr = False) -> None:
    """Wait until the kernel before this one is done and its writes are visible; then allow the
    next one to start, which waits in turn. If `early`, the next one may start before this wait."""
    if overlap:
        if early:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not early:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next_start(overlap: tl.constexpr) -> None:
    """Allow the next kernel to start once all programs of this one have; `await_previous` must
    follow."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_previous(overlap: tl.constexpr) -> None:
    """Wait until the kernel before this one is done and its writes are visible."""
    if overlap:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_rows(
    start: tl.tensor,
    rows: tl.tensor,
    row_bytes: tl.constexpr,
    ahead: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Ask for the first `ahead` bytes of each of `rows` adjacent rows to be brought to the L2
    cache; one thread a row, so there must be at least as many threads. The first row begins, and
    the sizes in bytes are, at multiples of 16; nothing happens without dependent launch."""
    if overlap and ahead > 0:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .u32 t;
            .reg .u64 a;
            mov.u32 t, %tid.x;
            setp.lt.u32 p, t, $2;
            mul.wide.u32 a, t, $3;
            add.u64 a, a, $1;
            @p cp.async.bulk.prefetch.L2.global [a], $4;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r",
            [start.to(tl.int64), rows, row_bytes, ahead],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
