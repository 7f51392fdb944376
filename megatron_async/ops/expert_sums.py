"""What the experts of a rank say of each token, and its sum.

The grouped products leave a row for each pair of a token and an expert. Who needs a token's sum
adds up its rows while reading them: this rank's next norm (here), or the exchange that sends sums
to other ranks (`ops/expert_combine.py`). Always in the order in which the router chose, in float32,
and rounded once, so that a sum is the same bits whoever adds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.expert_routing import IN_KERNEL_NO_EXPERT
from megatron_async.ops.rms_norm import MAX_HIDDEN, add_rms_norm_reference

SUM_BLOCK = 1024
MAX_TOPK = 31
"""Which of a token's experts are here is held in the bits of a positive int32."""


@dataclass(frozen=True)
class ExpertOutputs:
    """What experts here say of tokens, weighted, not yet added up.

    Attributes:
        rows: `[tokens * topk, hidden]`, contiguous; row p is of token p // topk and its expert
            number p % topk, and undefined where that expert is elsewhere.
        experts: int32 `[tokens, topk]` of these tokens; rows may be strided.
        first_expert: number of the first expert here.
        local: how many are here.
        dtype: of the sums.
    """

    rows: Tensor
    experts: Tensor
    first_expert: int
    local: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sums: tokens, hidden."""
        return self.experts.size(0), self.rows.size(1)

    def check(self) -> None:
        """Whether kernels can add them up.

        Raises:
            ValueError: shapes, dtypes or strides do not fit.
        """
        tokens, topk = self.experts.shape
        if self.rows.size(0) != tokens * topk or not self.rows.is_contiguous():
            raise ValueError(
                f"ExpertOutputs: rows must be contiguous, [{tokens} * {topk}, hidden]; found "
                f"{tuple(self.rows.shape)}, strides {self.rows.stride()}."
            )
        if self.rows.dtype != self.dtype or self.experts.stride(1) != 1:
            raise ValueError(
                f"ExpertOutputs: rows must be {self.dtype} and a token's experts adjacent; found "
                f"{self.rows.dtype} and strides {self.experts.stride()}."
            )
        if topk > MAX_TOPK:
            raise ValueError(f"ExpertOutputs: a token may have {MAX_TOPK} experts; found {topk}.")


def sum_experts(outputs: ExpertOutputs) -> Tensor:
    """The sum of each token's experts here, in their order.

    Args:
        outputs: on a GPU.

    Returns:
        `[tokens, hidden]`, contiguous; zeros where no expert is here.

    Raises:
        ValueError: see `ExpertOutputs.check`.
    """
    outputs.check()
    tokens, hidden = outputs.shape
    sums = torch.empty((tokens, hidden), dtype=outputs.dtype, device=outputs.rows.device)
    if tokens:
        topk = outputs.experts.size(1)
        _sum_kernel[(tokens, triton.cdiv(hidden, SUM_BLOCK))](
            outputs.rows,
            outputs.experts,
            outputs.experts.stride(0),
            sums,
            outputs.first_expert,
            local=outputs.local,
            hidden=hidden,
            topk=topk,
            block_topk=triton.next_power_of_2(topk),
            block=SUM_BLOCK,
            num_warps=4,
            **launch_options(sums),
        )
    return sums


def sum_experts_reference(outputs: ExpertOutputs) -> Tensor:
    """The same in plain torch."""
    topk = outputs.experts.size(1)
    number = outputs.experts - outputs.first_expert
    here = (number >= 0) & (number < outputs.local)
    rows = outputs.rows.view(-1, topk, outputs.shape[1]).where(here[:, :, None], 0.0)
    return rows.sum(1).to(outputs.dtype)


def sum_experts_add_rms_norm(
    outputs: ExpertOutputs, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`sum_experts`, added to the residual stream, and the norm of that, in one kernel: the results
    of `ops.rms_norm.add_rms_norm`.

    Args:
        outputs: on a GPU.
        residual: `[tokens, hidden]`; rows may be strided.
        weight: `[hidden]`, the norm's weight.
        eps: added to the mean square.

    Returns:
        normed `[tokens, hidden]`, and the new residual.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or the row is too long.
    """
    outputs.check()
    tokens, hidden = outputs.shape
    if residual.shape != outputs.shape or weight.shape != (hidden,) or hidden > MAX_HIDDEN:
        raise ValueError(
            f"sum_experts_add_rms_norm: sums are {outputs.shape}, so residual must be like them "
            f"and weight ({hidden},), of at most {MAX_HIDDEN}; found {tuple(residual.shape)} and "
            f"{tuple(weight.shape)}."
        )
    if residual.dtype != outputs.dtype or residual.stride(1) != 1:
        raise ValueError(
            f"sum_experts_add_rms_norm: residual must be {outputs.dtype} with adjacent elements in "
            f"its rows; found {residual.dtype}, strides {residual.stride()}."
        )
    normed = torch.empty((tokens, hidden), dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(normed)
    if tokens:
        topk, block = outputs.experts.size(1), triton.next_power_of_2(hidden)
        _sum_norm_kernel[(tokens,)](
            outputs.rows,
            outputs.experts,
            outputs.experts.stride(0),
            residual,
            weight,
            normed,
            total,
            residual.stride(0),
            eps,
            outputs.first_expert,
            local=outputs.local,
            hidden=hidden,
            topk=topk,
            block_topk=triton.next_power_of_2(topk),
            block=block,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(residual),
        )
    return normed, total


def sum_experts_add_rms_norm_reference(
    outputs: ExpertOutputs, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    return add_rms_norm_reference(sum_experts_reference(outputs), residual, weight, eps)


@triton.jit
def experts_here(
    experts: tl.tensor,
    experts_stride: tl.tensor,
    token: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    topk: tl.constexpr,
    block_topk: tl.constexpr,
) -> tl.tensor:
    """Bit n says whether a token's n-th expert is here. One load tells it of all, so that the rows
    can be asked for together."""
    nth = tl.arange(0, block_topk)
    place = experts + token * experts_stride + nth
    number = tl.load(place, mask=nth < topk, other=IN_KERNEL_NO_EXPERT) - first_expert
    here = (number >= 0) & (number < local)
    return tl.sum(here.to(tl.int32) << nth, 0)


@triton.jit
def add_experts(
    rows: tl.tensor,
    token: tl.tensor,
    here: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    hidden: tl.constexpr,
    topk: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Columns of a token's sum, float32 `[block]`; `token` is an int64."""
    total = tl.zeros((block,), tl.float32)
    for nth in tl.static_range(topk):
        start = rows + (token * topk + nth) * hidden
        is_here = ((here >> nth) & 1) != 0
        total += tl.load(start + column, mask=inside & is_here, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["first_expert"])
def _sum_kernel(
    rows: tl.tensor,
    experts: tl.tensor,
    experts_stride: tl.tensor,
    sums: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    hidden: tl.constexpr,
    topk: tl.constexpr,
    block_topk: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    here = experts_here(experts, experts_stride, token, first_expert, local, topk, block_topk)
    total = add_experts(rows, token, here, column, inside, hidden, topk, block)
    tl.store(sums + token * hidden + column, total.to(sums.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_expert"])
def _sum_norm_kernel(
    rows: tl.tensor,
    experts: tl.tensor,
    experts_stride: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    hidden: tl.constexpr,
    topk: tl.constexpr,
    block_topk: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    dtype: tl.constexpr = total.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap)
    here = experts_here(experts, experts_stride, token, first_expert, local, topk, block_topk)
    before = tl.load(residual + token * residual_stride + column, mask=inside, other=0.0)
    value = add_experts(rows, token, here, column, inside, hidden, topk, block)
    value = value.to(dtype).to(tl.float32)
    rounded = (before.to(tl.float32) + value).to(dtype)
    tl.store(total + token * hidden + column, rounded, mask=inside)
    value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value) / hidden + eps)
    tl.store(normed + token * hidden + column, value * factor * scale, mask=inside)
