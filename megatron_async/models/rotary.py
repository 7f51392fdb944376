"""Rotary position embedding by table: cos and sin of every position, computed once in float32.

Rotary embedding: Su et al. 2021. The Llama-3 frequency scaling follows the published Llama 3.1
reference: wavelengths beyond the original context are stretched, those far inside are kept, and
those between are blended.

Megatron's models compute a tensor of angles in every forward and pass it to attention. Here
`PagedSelfAttention` rotates by a table. So the frequencies of a model's `RotaryEmbedding` are read
when the model is wrapped, and the module is not called any more. Learned positions are part of the
embedding, which is not changed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_async.models.architecture import LINEAR, YARN, RopeScaling, yarn_factor
from megatron_async.models.partition import attention_numbers, layer_windows
from megatron_async.models.pipeline import stage_of

if TYPE_CHECKING:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


def inverse_frequencies(dim: int, base: float, scaling: RopeScaling | None = None) -> Tensor:
    """Inverse frequencies of the `dim / 2` rotated pairs: float32, on the CPU."""
    # Same operations in the same order as the models' training code, so that the table is
    # bit-identical to theirs: token-exact comparisons depend on it.
    exponent = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / dim
    inv_freq = 1.0 / (base**exponent)
    if scaling is None:
        return inv_freq
    if scaling.kind == LINEAR:
        return inv_freq / scaling.factor
    if scaling.kind == YARN:
        kept = 1 - _stretched_share(dim, base, scaling)
        stretched = 1.0 / (scaling.factor * base**exponent)
        return stretched * (1 - kept) + inv_freq * kept
    wavelength = 2 * math.pi / inv_freq
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    stretched = torch.where(wavelength > low, inv_freq / scaling.factor, inv_freq)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, stretched)


def _stretched_share(dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """How far each pair's wave is stretched by YaRN (arXiv 2309.00071, section 3.2), float32 `[dim
    / 2]`: from 0 where the wave turns `beta_fast` times in the original context, to 1 where it
    turns `beta_slow` times."""
    length = scaling.original_max_position_embeddings
    first, last = (
        dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    return ((pairs - first) / (last - first)).clamp(0, 1)


def described_frequencies(config: Any) -> Tensor:
    """Inverse frequencies of the rope that a model's configuration describes. Empty for Megatron's
    own configuration, which has no rope fields (`take_over_positions` reads the model)."""
    kind = getattr(config, "position_embedding_type", "rope")
    if kind == "none" or not hasattr(config, "rotary_base"):
        return torch.empty(0, device="cpu")
    scaling = getattr(config, "rope_scaling", None)
    rotated = int(config.kv_channels * getattr(config, "rotary_percent", 1.0))
    return inverse_frequencies(rotated, config.rotary_base, scaling)


class RotaryTable:
    """cos and sin for positions 0 .. max_positions - 1.

    Args:
        frequencies: float32 `[rotated / 2]`, on the CPU: inverse frequencies of the rotated pairs;
            none for a model without rotary embedding.
        max_positions: number of rows.
        device: where the table lives.
        interpolation: positions are divided by it (linear interpolation, Chen et al. 2023).
        factor: of cos and sin (`RopeScaling.attention_factor`).

    Attributes:
        cos, sin: float32 `[max_positions, rotated]`; the second half repeats the first, because the
            rotation pairs element i of a head with i + rotated / 2.
        others: tables of KV layers that have one of their own (`other_tables`).
    """

    def __init__(
        self,
        frequencies: Tensor,
        max_positions: int,
        device: torch.device,
        interpolation: float | None = None,
        factor: float = 1.0,
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        if interpolation is not None:
            positions *= 1 / interpolation
        angles = torch.outer(positions, frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = (angles.cos() * factor).to(device)
        self.sin = (angles.sin() * factor).to(device)
        self.others: dict[int, RotaryTable] = {}

    def of(self, layer: int) -> RotaryTable:
        """The table of a KV layer."""
        return self.others.get(layer, self)

    @classmethod
    def described(cls, config: Any, max_positions: int, device: torch.device) -> RotaryTable:
        """The table that a model's configuration describes, with those of its layers."""
        scaling = getattr(config, "rope_scaling", None)
        factor = scaling.attention_factor if isinstance(scaling, RopeScaling) else 1.0
        made = cls(described_frequencies(config), max_positions, device, factor=factor)
        made.others = other_tables(config, max_positions, device)
        return made


def other_tables(config: Any, positions: int, device: torch.device) -> dict[int, RotaryTable]:
    """Tables of those KV layers of a pipeline stage that are not rotated as the rest: not at all
    (Megatron's `no_rope_freq`), or, as layers with a window, by `ModelConfig.window_rotary_base`.
    A table for each kind. `positions`: rows of the tables."""
    skips = getattr(config, "no_rope_freq", None) or ()
    base = getattr(config, "window_rotary_base", None)
    if not skips and base is None:
        return {}
    index = stage_of(config).index
    empty = torch.empty(0, device="cpu")
    unrotated = RotaryTable(empty, positions, device)
    of_windows = unrotated
    if base is not None:
        rotated = int(config.kv_channels * config.rotary_percent)
        of_windows = RotaryTable(inverse_frequencies(rotated, base), positions, device)
    found = {}
    layers = zip(attention_numbers(config)[index], layer_windows(config)[index])
    for layer, (number, window) in enumerate(layers):
        if skips and skips[number - 1]:
            found[layer] = unrotated
        elif window and base is not None:
            found[layer] = of_windows
    return found


LEARNED = "learned_absolute"


class AppliedInAttention(nn.Module):
    """Replaces a model's `RotaryEmbedding`, which is kept for its frequencies, and returns no
    angles."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Nothing is to be computed."""
        return 0

    def forward(self, *_: Any, **__: Any) -> tuple[None, None] | None:
        """No angles, and no factor of YaRN's."""
        return None if yarn_of(self.rotary) is None else (None, None)


def rotary_of(model: nn.Module) -> Any:
    """The rotary embedding of a model, Megatron's module; None if it has none."""
    found: Any = getattr(model, "rotary_pos_emb", None)
    return found.rotary if isinstance(found, AppliedInAttention) else found


def take_over_positions(
    model: nn.Module, max_length: int, device: torch.device
) -> RotaryTable | None:
    """The table of the frequencies of `model`, one that `check_model` has passed, for sequences of
    `max_length`; the model computes no angles from then on. None for a model without a rotary
    embedding of its own: it keeps what its configuration describes, which is nothing for Megatron's
    `TransformerConfig`."""
    rotary = rotary_of(model)
    frequencies, interpolation, factor = torch.empty(0), None, 1.0
    if rotary is not None and (scaling := yarn_of(rotary)) is not None:
        frequencies = inverse_frequencies(rotary.dim, rotary.rotary_base, scaling)
        factor = scaling.attention_factor
        model.rotary_pos_emb = AppliedInAttention(rotary)
    elif rotary is not None:
        # With their scaling, and in the number that the rotated share of a head has.
        frequencies = rotary.inv_freq.float().cpu()  # sync-ok: before the first step
        interpolation = rotary.seq_len_interpolation_factor
        model.rotary_pos_emb = AppliedInAttention(rotary)
    elif getattr(model, "position_embedding_type", None) != LEARNED:
        return None
    return RotaryTable(frequencies, max_length, device, interpolation, factor)


def yarn_of(rotary: Any) -> RopeScaling | None:
    """The scaling of Megatron's `YarnRotaryEmbedding`; None for its others, whose frequencies have
    theirs."""
    if not hasattr(rotary, "correction_range_round_to_int"):
        return None
    return RopeScaling(
        rotary.scaling_factor,
        original_max_position_embeddings=rotary.original_max_position_embeddings,
        kind=YARN,
        beta_fast=rotary.beta_fast,
        beta_slow=rotary.beta_slow,
        truncate=rotary.correction_range_round_to_int,
        attention_factor=yarn_factor(rotary.scaling_factor, rotary.mscale, rotary.mscale_all_dim),
    )
