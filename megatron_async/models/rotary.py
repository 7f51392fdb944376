"""Rotary position embedding by table: cos and sin of every position, computed once in float32.

Rotary embedding: Su et al. 2021. The Llama-3 frequency scaling follows the published Llama 3.1
reference: wavelengths beyond the original context are stretched, those far inside are kept, and
those between are blended.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_async.models.architecture import RopeScaling


def inverse_frequencies(
    dim: int, base: float, scaling: RopeScaling | None = None
) -> Tensor:
    """Inverse frequencies of the `dim / 2` rotated pairs: float32, on the CPU."""
    # Same operations in the same order as the models' training code, so that the table is
    # bit-identical to theirs: token-exact comparisons depend on it.
    exponent = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / dim
    inv_freq = 1.0 / (base**exponent)
    if scaling is None:
        return inv_freq
    wavelength = 2 * math.pi / inv_freq
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    smooth = (
        scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
    ) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    stretched = torch.where(wavelength > low, inv_freq / scaling.factor, inv_freq)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, stretched)


class RotaryTable:
    """cos and sin for positions 0 .. max_positions - 1.

    Args:
        dim: rotated dimensions of a head (even).
        max_positions: number of rows.
        base: rope base ("theta").
        scaling: Llama-3 scaling or None.
        device: where the table lives.

    Attributes:
        cos, sin: float32 `[max_positions, dim]`; the second half repeats the first, because the
            rotation pairs element i with i + dim / 2.
    """

    def __init__(
        self,
        dim: int,
        max_positions: int,
        base: float,
        scaling: RopeScaling | None,
        device: torch.device,
    ) -> None:
        angles = torch.outer(
            torch.arange(max_positions, dtype=torch.float32, device="cpu"),
            inverse_frequencies(dim, base, scaling),
        )
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)
