"""The causal convolution of recurrent layers in plain torch: its history, its taps and its
activation, for Mamba-2 (with a bias) and Gated DeltaNet (without one)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.recurrent.recurrent_pools import CONV_WIDTH


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[..., 3 + tokens, channels]` to `[..., tokens, channels]`, behind SiLU, in its dtype.

    In float64: torch computes the last few elements of a tensor by other code than the rest, and a
    token's numbers must not depend on how many others there are.

    Args:
        inputs: the tokens' inputs behind the three before them.
        weight: `[channels, 4]` or `[channels, 1, 4]`.
        bias: `[channels]` or None.
    """
    windows = inputs.to(torch.float64).unfold(-2, CONV_WIDTH, 1)
    value = (windows * weight.view(-1, CONV_WIDTH).to(torch.float64)).sum(-1)
    if bias is not None:
        value = value + bias.to(torch.float64)
    return F.silu(value).to(inputs.dtype)


def with_history(raw: Tensor, conv: Tensor, row: Tensor | int, first: Tensor | int) -> Tensor:
    """Inputs behind the three before them, which are 0 before position 0.

    Args:
        raw: `[rows, tokens, channels]`: inputs of the rows' tokens; of one row without `rows`.
        conv: the pool `[pool rows, conv ring, channels]`.
        row: int64 `[rows, 1]`: pool rows; of one row its number.
        first: `[rows, 1]`: position of the rows' first tokens; of one row its number.

    Returns:
        `[rows, 3 + tokens, channels]`, of one row without the first dimension.
    """
    earlier = first + torch.arange(1 - CONV_WIDTH, 0, device=raw.device)
    history = conv[row, earlier % conv.size(1)]
    return torch.cat((torch.where((earlier >= 0)[..., None], history, 0), raw), -2)
