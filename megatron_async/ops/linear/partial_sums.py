"""Adding up the partial sums of a split product, for a reader that is not a norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous

BLOCK = 1024


def add_partial_sums(product: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The product that a layer gave, whole, `[tokens, 1, out]`.

    Args:
        product: that, or partial sums of it, float32 `[splits, tokens, 1, out]`, contiguous: they
            are added in order and rounded once.
        out: contiguous: where to put it; None: a new tensor, or the product itself where nothing is
            to be done.
    """
    parts = product.size(0) if product.dim() == 4 else 1
    whole = product[0] if product.dim() == 4 else product
    if out is None and parts == 1 and whole.dtype == dtype:
        return whole
    if out is None:
        out = torch.empty(whole.shape, dtype=dtype, device=product.device)
    if not product.is_cuda:
        return out.copy_(product.sum(0) if parts > 1 else whole)
    return launch_sum(product, parts, out)


def launch_sum(product: Tensor, parts: int, out: Tensor) -> Tensor:
    """The kernel behind `add_partial_sums`: `out` = the sum of `parts` equal parts of `product`.

    Raises:
        ValueError: a tensor is not contiguous, or the sizes do not fit.
    """
    count = out.numel()
    if not product.is_contiguous() or not out.is_contiguous() or product.numel() != parts * count:
        raise ValueError(
            f"add_partial_sums: {parts} parts of {tuple(out.shape)} must be contiguous, and so "
            f"must the result; found {tuple(product.shape)}, strides {product.stride()}."
        )
    if count:
        _sum_kernel[(triton.cdiv(count, BLOCK),)](
            product, out, count, parts=parts, block=BLOCK, **launch_options(product)
        )
    return out


@triton.jit
def _sum_kernel(
    product: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    parts: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    wait_for_previous(overlap)
    value = tl.load(product + place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        value += tl.load(product + part * count + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value, mask=inside)
