"""What the references of recurrent layers share: the causal convolution with its history (Mamba-2
has a bias, Gated DeltaNet none), and what the rings hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.recurrent.recurrent_pools import CONV_WIDTH, wide_dtype


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[..., 3 + tokens, channels]` to `[..., tokens, channels]`, after SiLU, in its dtype.

    In float64: torch computes the last few elements of a tensor by other code than the rest, and a
    token's numbers must not depend on how many others there are.

    Args:
        inputs: the tokens' inputs, preceded by the three before them.
        weight: `[channels, 4]` or `[channels, 1, 4]`.
        bias: `[channels]` or None.
    """
    windows = inputs.to(torch.float64).unfold(-2, CONV_WIDTH, 1)
    value = (windows * weight.view(-1, CONV_WIDTH).to(torch.float64)).sum(-1)
    if bias is not None:
        value = value + bias.to(torch.float64)
    return F.silu(value).to(inputs.dtype)


def with_history(raw: Tensor, conv: Tensor, row: Tensor | int, first: Tensor | int) -> Tensor:
    """Inputs preceded by the three before them, which are 0 before position 0.

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


def ring_inputs(
    pools: Sequence[Tensor], row: Tensor, begin: Tensor, end: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the rings of a layer hold for the tokens `begin` to `end` - 1; 0 behind them.

    Args:
        pools: of one layer: `state`, `ring_xb` and `ring_gates` of `RecurrentPools`.
        row: int64 `[rows, 1]`.
        begin, end: `[rows, 1]`.

    Returns:
        left `[rows, ring, heads, size]`, right `[rows, ring, heads, columns]`, and decay and gain
        `[rows, ring, heads]`, wide; one entry for each of the ring.
    """
    state, ring, gates = pools[:3]
    heads, size, columns = state.shape[1:]
    wide = wide_dtype(ring.dtype)
    position = begin + torch.arange(ring.size(1), device=begin.device)
    exists = (position < end)[..., None]
    entry = position % ring.size(1)
    inputs = torch.where(exists, ring[row, entry], 0).to(wide)
    left, right = inputs.split([heads * size, inputs.size(2) - heads * size], dim=2)
    right = right.unflatten(2, (-1, columns))
    right = right.repeat_interleave(heads // right.size(2), dim=2)
    of_tokens = torch.where(exists[..., None], gates[row, entry], 0)
    decay = of_tokens[:, :, 0]
    gain = of_tokens[:, :, 1] if gates.size(2) > 1 else exists.to(wide).expand_as(decay)
    return left.unflatten(2, (heads, size)), right, decay, gain
