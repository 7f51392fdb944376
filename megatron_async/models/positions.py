"""Position embeddings of a model, and which module applies them.

Megatron's models compute a tensor of angles in every forward and pass it to attention. Here
`PagedSelfAttention` rotates by a table. So the frequencies of a model's `RotaryEmbedding` are read
when the model is wrapped, and the module is not called any more. Learned positions are part of the
embedding, which is not changed.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import nn

from megatron_async.models.rotary import RotaryTable

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

    def forward(self, *_: Any, **__: Any) -> None:
        """No angles."""


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
    frequencies, interpolation = torch.empty(0), None
    if rotary is not None:
        # With their scaling, and in the number that the rotated share of a head has.
        frequencies = rotary.inv_freq.float().cpu()  # sync-ok: before the first step
        interpolation = rotary.seq_len_interpolation_factor
        model.rotary_pos_emb = AppliedInAttention(rotary)
    elif getattr(model, "position_embedding_type", None) != LEARNED:
        return None
    return RotaryTable(frequencies, max_length, device, interpolation)
