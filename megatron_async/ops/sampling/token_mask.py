"""Mask the tokens that a row's grammar does not allow."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.op import op, promising

TILE = 2048
BITS = 32


def mask_words(vocab_size: int) -> int:
    """int32 words of one row's mask."""
    return -(-vocab_size // BITS)


@op
def apply_token_mask(logits: Tensor, masks: Tensor) -> None:
    """Set the logits of tokens that are not allowed to minus infinity. NaN stays, to be found when
    the row is sampled.

    Args:
        logits: float32 `[rows, vocabulary]`, changed.
        masks: int32 `[rows, mask_words(vocabulary)]`; bit i % 32 of word i // 32 allows token i.
    """
    bits = (masks[:, :, None] >> torch.arange(BITS, device=masks.device)) & 1
    banned = bits.flatten(1)[:, : logits.size(1)] == 0
    logits.masked_fill_(banned & ~logits.isnan(), -torch.inf)


@apply_token_mask.gpu
@promising("invariant")
def apply_token_mask_gpu(logits: Tensor, masks: Tensor) -> None:
    """Both must be contiguous."""
    rows, vocab = logits.shape
    grid = (triton.cdiv(vocab, TILE), rows)
    _apply_token_mask[grid](logits, masks, vocab, masks.stride(0), TILE)


@triton.jit
def _apply_token_mask(
    logits: tl.tensor,
    masks: tl.tensor,
    vocab: tl.constexpr,
    mask_stride: tl.tensor,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = token < vocab
    word = tl.load(masks + row * mask_stride + token // 32, mask=inside, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    place = logits + row * vocab + token
    logit = tl.load(place, mask=inside, other=0.0)
    minus = tl.full((tile,), float("-inf"), tl.float32)
    tl.store(place, minus, mask=inside & banned & (logit == logit))
