"""All-reduce over symmetric memory: GPUs of one host that read and write each other's memory.

On H200s over NVLink, in a CUDA graph, the sum of a decode step's rows takes 4 to 11 microseconds
so, the norm after it included, and NCCL's 8 to 15 (65 of them are in a step of an 8B model;
docs/records/several_gpus.md). Two kernels, by size:

- **one shot** (`all_reduce_add_rms_norm`): every rank reads all summands, and does the residual add
  and the norm after it, those of `ops/linear/rms_norm.py`. For few bytes. One program a row, which
  is a place of a `Meeting`, writes this rank's summand, meets the other ranks, and reads all. They
  are added in the order of ranks, in float32, so every rank gets the same bits.
- **two shot** (torch's `symm_mem.two_shot_all_reduce_`): every rank adds up its share of the
  elements and writes it to all. Each element is added on one rank, so all have the same bits. It
  begins with its own summand: the order follows the place in the tensor.
- **one shot in slices** (`SymmetricAllReduce.in_order`): any number of rows in the order of ranks.

No multicast: it is not available everywhere, and leaves the order of additions to the switch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.linear.partial_sums import add_partial_sums
from megatron_async.ops.linear.rms_norm import MAX_HIDDEN
from megatron_async.ops.ranks.symmetric_memory import Meeting, make_meeting, meet, share

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

    def in_order(self, product: Tensor) -> Tensor:
        """The sum over the ranks of a product as for `all_reduce`, of any number of tokens, each
        added in the order of ranks, as `add_rms_norm` does; `[tokens, 1, hidden]`."""
        whole = add_partial_sums(product, self._dtype).flatten(0, 1)
        total, most = torch.empty_like(whole), self.one_shot_rows
        for rows, place in zip(whole.split(most), total.split(most), strict=True):
            all_reduce_in_order(rows, place, self._one_shot)
        return total[:, None]

    def all_reduce(self, product: Tensor) -> Tensor:
        """The sum over the ranks, `[tokens, 1, hidden]`, in the workspace: valid until the next."""
        shape = product.shape[-3:]
        place = self._two_shot[: shape.numel()]
        add_partial_sums(product, self._dtype, place.view(shape))
        torch.ops.symm_mem.two_shot_all_reduce_(place, "sum", self._group_name)
        return place.view(shape)


def all_reduce_in_order(x: Tensor, total: Tensor, meeting: Meeting) -> None:
    """Sum over the ranks as in `all_reduce_add_rms_norm`, in the same order, and nothing behind it.

    Args:
        x: this rank's summand, `[tokens, hidden]`, contiguous, on a GPU.
        total: where to put the sum, of the same form.
        meeting: its data are rows of the same dtype; it has as many places as there are tokens.
    """
    _launch(x, None, total, 0.0, meeting)


def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, meeting: Meeting
) -> tuple[Tensor, Tensor]:
    """Sum over the ranks, added to the residual stream, and the norm of that.

    Args:
        x: this rank's summand, `[tokens, hidden]`, or partial sums of it, float32 `[parts, tokens,
            hidden]`; contiguous, on a GPU. It is rounded to the residual's dtype before it is sent.
        residual: `[tokens, hidden]`, equal on all ranks.
        weight: `[hidden]`, the norm's weight.
        eps: added to the mean square.
        meeting: its data are rows of the residual's dtype, `[2, places, hidden]`.

    Returns:
        normed `[tokens, hidden]`, and the new residual.

    Raises:
        ValueError: shapes or strides do not fit, or there are more tokens than rows.
    """
    tokens, hidden = residual.shape
    if x.shape[-2:] != residual.shape or weight.shape != (hidden,) or hidden > MAX_HIDDEN:
        raise ValueError(
            f"all_reduce_add_rms_norm: x is {tuple(x.shape)} and residual {tuple(residual.shape)}, "
            f"so weight must be ({hidden},), of at most {MAX_HIDDEN}; found {tuple(weight.shape)}."
        )
    if not x.is_contiguous() or residual.stride(1) != 1 or tokens > meeting.places:
        raise ValueError(
            f"all_reduce_add_rms_norm: x (strides {x.stride()}) must be contiguous, elements of a "
            f"row of residual (strides {residual.stride()}) adjacent, and there may be at most "
            f"{meeting.places} tokens; found {tokens}."
        )
    normed = torch.empty((tokens, hidden), dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(normed)
    _launch(x, (residual, weight, normed), total, eps, meeting)
    return normed, total


def _launch(
    x: Tensor,
    norm: tuple[Tensor, Tensor, Tensor] | None,
    total: Tensor,
    eps: float,
    meeting: Meeting,
) -> None:
    """`norm` are residual, weight and where to put the norm."""
    residual, weight, normed = norm or (total, total, total)
    tokens, hidden = total.shape
    if tokens:
        block = triton.next_power_of_2(hidden)
        _all_reduce_add_rms_norm_kernel[(tokens,)](
            x,
            residual,
            weight,
            normed,
            total,
            meeting.pointers,
            meeting.turns,
            residual.stride(0),
            eps,
            **meeting.constants,
            hidden=hidden,
            block=block,
            parts=x.size(0) if x.dim() == 3 else 1,
            has_norm=norm is not None,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(residual),
        )


@triton.jit
def _all_reduce_add_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    pointers: tl.tensor,
    turns: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    lanes: tl.constexpr,
    places: tl.constexpr,
    first: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
    has_norm: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    dtype: tl.constexpr = total.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    if has_norm:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap)
    summand = tl.load(x + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        place = (part * tl.num_programs(0) + row) * hidden + column
        summand += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    turn = tl.load(turns + row) + 1
    start = first + ((turn & 1).to(tl.int64) * places + row) * hidden
    mine = tl.multiple_of(tl.load(pointers + rank).to(tl.pointer_type(dtype)), 16)
    tl.store(mine + start + column, summand.to(dtype), mask=inside)
    meet(pointers, turns, row, turn, rank, ranks, lanes)
    value = tl.zeros((block,), tl.float32)
    for peer in tl.static_range(ranks):
        its = tl.multiple_of(tl.load(pointers + peer).to(tl.pointer_type(dtype)), 16)
        found = tl.load(its + start + column, mask=inside, other=0.0, cache_modifier=".cg")
        value += found.to(tl.float32)
    if has_norm:
        value = value.to(dtype).to(tl.float32)
        before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        rounded = (before.to(tl.float32) + value).to(dtype)
        tl.store(total + row * hidden + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
        factor = tl.rsqrt(tl.sum(value * value) / hidden + eps)
        tl.store(normed + row * hidden + column, value * factor * scale, mask=inside)
    else:
        tl.store(total + row * hidden + column, value, mask=inside)
