"""Position embeddings of a model, and which module applies them.

Megatron's models compute a tensor of angles in every forward and pass it to attention. Here
`PagedSelfAttention` rotates by a table. So the frequencies of a model's `RotaryEmbedding` are read
when the model is wrapped, and the module is not called any more. Learned positions are part of the
embedding, which is not changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import nn

from megatron_async.models.rotary import RotaryTable

if TYPE_CHECKING:
    from megatron_async.contexts.dynamic_context import DynamicInferenceContext

LEARNED = "learned_absolute"


class AppliedInAttention(nn.Module):
    """Replaces a model's `RotaryEmbedding` and returns no angles.

    Args:
        rotary: the model's own module, which has the frequencies.
    """

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


def take_over_positions(model: nn.Module, context: DynamicInferenceContext) -> None:
    """Make the context rotate by the frequencies of `model`, and the model compute no angles.

    A model without a rotary embedding of its own keeps what its configuration describes, which is
    nothing for Megatron's `TransformerConfig`.

    Args:
        model: one that `check_model` has passed.
        context: that the model will run in.
    """
    rotary, view = rotary_of(model), context.gpu_view
    frequencies, interpolation = torch.empty(0), None
    if rotary is not None:
        # With their scaling, and in the number that the rotated share of a head has.
        frequencies = rotary.inv_freq.float().cpu()  # sync-ok: before the first step
        interpolation = rotary.seq_len_interpolation_factor
        model.rotary_pos_emb = AppliedInAttention(rotary)
    elif getattr(model, "position_embedding_type", None) != LEARNED:
        return
    device = context.device.torch_device
    view.rotary = RotaryTable(frequencies, context.max_sequence_length, device, interpolation)
