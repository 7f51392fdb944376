"""All-reduce over symmetric memory: GPUs of one host that read and write each other's memory.

On H200s over NVLink, in a CUDA graph, the sum of a decode step's rows takes 4 to 11 microseconds
so, the norm after it included, and NCCL's 8 to 15 (65 of them are in a step of an 8B model;
docs/records/several_gpus.md). Two kernels, by size:

- **one shot** (`ops/ranks/all_reduce_norm.py`): every rank reads all summands, adds them in the
  order of ranks, and does the residual add and the norm after it. For few bytes.
- **two shot** (torch's `symm_mem.two_shot_all_reduce_`): every rank adds up its share of the
  elements and writes it to all. Each element is added on one rank, so all have the same bits.

No multicast: it is not available everywhere, and leaves the order of additions to the switch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.ops.linear.partial_sums import add_partial_sums
from megatron_async.ops.linear.rms_norm import MAX_HIDDEN
from megatron_async.ops.ranks.all_reduce_norm import all_reduce_add_rms_norm
from megatron_async.ops.ranks.symmetric_memory import make_meeting, share

TWO_SHOT_BYTES = 16 << 20
"""Largest sum of the two-shot kernel. With its copy it takes 84 microseconds at 16 MiB over 2
H200s, where NCCL takes 91, and 117 over 4, where NCCL takes 113; below that it is ahead."""
TWO_SHOT_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes that torch's kernel adds."""
ONE_SHOT_BYTES = 2 << 20
"""Most bytes that a rank reads from others in the one-shot kernel. On 2 H200s it is still ahead
there (11.2 microseconds, two shot 16.6); on 4 the lines are about to meet (9.9 and 11.6 at three
quarters)."""


class SymmetricAllReduce:
    """Workspaces of a group, made once, and the kernels on them; the arguments are those of
    `TensorCollectives.prepare`.

    The two-shot kernel's elements are written by this rank's copy, then by the kernel on any rank,
    which ends only when all ranks are done with them; the result is read before the next sum
    overwrites it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        max_rows: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group_name, self._dtype = group.group_name, dtype
        row_bytes = hidden * dtype.itemsize
        most = ONE_SHOT_BYTES // (row_bytes * (group.size() - 1))
        self.one_shot_rows = min(max_rows, max(most, 1)) if hidden <= MAX_HIDDEN else 0
        self.two_shot_rows = 0
        if dtype in TWO_SHOT_DTYPES:
            self.two_shot_rows = min(max_rows, TWO_SHOT_BYTES // row_bytes)
        self._two_shot, _ = share(max(self.two_shot_rows, 1) * hidden, dtype, device, group)
        self._one_shot = make_meeting(group, self.one_shot_rows, hidden, dtype, device)

    def __str__(self) -> str:
        return (
            f"one shot up to {self.one_shot_rows} rows, two shot up to {self.two_shot_rows}, over "
            "symmetric memory"
        )

    def adds_with_norm(self, product: Tensor) -> bool:
        """Whether `add_rms_norm` takes a product `[tokens, 1, hidden]` or its partial sums."""
        return product.size(-3) <= self.one_shot_rows

    def add_rms_norm(
        self, product: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`all_reduce_add_rms_norm` of a product that `adds_with_norm`."""
        rows = product.flatten(-3, -2)
        return all_reduce_add_rms_norm(rows, residual, weight, eps, self._one_shot)

    def takes(self, product: Tensor) -> bool:
        """Whether `all_reduce` takes a product `[tokens, 1, hidden]` or its partial sums."""
        return product.size(-3) <= self.two_shot_rows

    def all_reduce(self, product: Tensor) -> Tensor:
        """The sum over the ranks, `[tokens, 1, hidden]`, in the workspace: valid until the next."""
        shape = product.shape[-3:]
        place = self._two_shot[: shape.numel()]
        add_partial_sums(product, self._dtype, place.view(shape))
        torch.ops.symm_mem.two_shot_all_reduce_(place, "sum", self._group_name)
        return place.view(shape)
