"""Embedding lookup in one rank's rows of the vocabulary; tokens of other ranks give zeros.

The sum over all ranks is the embedding: one summand of each element is not zero, so no rounding
happens, whatever the dtype and the order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op, promising

BLOCK = 1024


@op
def vocab_embedding(token_ids: Tensor, weight: Tensor, first: int, scale: float = 1.0) -> Tensor:
    """Look tokens up.

    Args:
        token_ids: int64 `[tokens]` on a GPU.
        weight: `[rows, hidden]`, contiguous: the embeddings of tokens from `first` on.
        first: token id of the first row.
        scale: embeddings are multiplied by it.

    Returns:
        `[tokens, hidden]`, the weight's dtype.

    Raises:
        ValueError: the weight is not contiguous.
    """
    row = token_ids - first
    elsewhere = (row < 0) | (row >= len(weight))
    found = F.embedding(row.masked_fill(elsewhere, 0), weight)
    found = found.masked_fill_(elsewhere[:, None], 0.0)
    return found if scale == 1 else found * scale


@vocab_embedding.gpu
@promising("invariant")
def vocab_embedding_gpu(
    token_ids: Tensor, weight: Tensor, first: int, scale: float = 1.0
) -> Tensor:
    if not weight.is_contiguous():
        raise ValueError("vocab_embedding: the weight must be contiguous: call .contiguous().")
    tokens, (rows, hidden) = token_ids.numel(), weight.shape
    out = torch.empty((tokens, hidden), dtype=weight.dtype, device=weight.device)
    if tokens:
        _vocab_embedding_kernel[(tokens, triton.cdiv(hidden, BLOCK))](
            token_ids,
            weight,
            out,
            first,
            rows,
            float(scale),
            hidden=hidden,
            block=BLOCK,
            is_scaled=scale != 1,
            **launch_options(out),
        )
    return out


@triton.jit
def _vocab_embedding_kernel(
    token_ids: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    hidden: tl.constexpr,
    block: tl.constexpr,
    is_scaled: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    wait_for_previous(overlap)
    row = tl.load(token_ids + token) - first
    here = (row >= 0) & (row < rows)
    inside = column < hidden
    value = tl.load(weight + row * hidden + column, mask=inside & here, other=0.0)
    if is_scaled:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(out + token * hidden + column, value, mask=inside)
