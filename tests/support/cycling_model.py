"""Models whose text repeats itself, nearly: what an n-gram drafter lives of."""

from typing import Any

import torch
from torch import Tensor

from megatron_async.device_state.gpu_view import ContextGPUView
from tests.support.attention_model import AttentionModel
from tests.support.hybrid_model import HybridAttentionModel

PERIOD = 16


class CyclingModel(AttentionModel):
    """`AttentionModel`, its text drawn to a cycle of `PERIOD` tokens: `strength` is added to the
    logit of the token that goes on with the cycle. The model's own choice, which depends on the
    whole sequence, beats it once in a while."""

    strength = 120.0

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        inference_context: ContextGPUView,
        runtime_gather_output: bool,
    ) -> Tensor:
        """What `AttentionModel.forward` does."""
        view = inference_context
        logits = super().forward(
            token_ids, position_ids, attention_mask, view, runtime_gather_output
        )
        last = token_ids[0].index_select(0, view.step.last_token)
        following = (5 * last + 1) % PERIOD
        rows = torch.arange(len(last), device=last.device)
        logits[0, rows, following] += self.strength
        return logits


class CyclingHybridModel(CyclingModel, HybridAttentionModel):
    """A cycling model with recurrent layers."""

    strength = 450.0


CYCLING_MODELS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (CyclingModel, CyclingHybridModel)
}
