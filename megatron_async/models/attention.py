"""Self-attention over the paged KV cache, as a Megatron-Core module.

`PagedSelfAttention` keeps all parts of Megatron's `SelfAttention` that have parameters (so
checkpoints load unchanged) and replaces its forward. Rotary embedding by position, KV append and
attention read only the step's `StepView`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from megatron_async.models.decoder_layer import attended
from megatron_async.ops.linear.stream import Stream

if TYPE_CHECKING:
    from megatron_async.models.step_view import StepView


class PagedCoreAttention(nn.Module):
    """The `core_attention` that Megatron's layer spec requires; it has no parameters.

    `StepView.attention`, which has the KV cache, computes the attention.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()


class PagedSelfAttention(SelfAttention):
    """Megatron self-attention whose keys and values live in the engine's paged cache.

    `kv_layer_index` is this module's layer in the KV cache. The controller stamps it
    (`stamp_kv_layers`), because Megatron's `layer_number` counts MLP and Mamba layers too.
    """

    kv_layer_index: int = -1
    cache_scales: Tensor | None = None
    """Scales of keys and values that are stored in fp8, as `scales_of` makes them for this rank's
    heads; None: the checkpoint has none. No parameter: an update of weights leaves it alone."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        inference_context: StepView | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one step, called by Megatron's own layers (ours call `attention_layer`):
        `[tokens, 1, hidden]` -> the same and the projection's bias or None. The mask is ignored:
        causality follows from the positions of the view.

        Raises:
            RuntimeError: called without a view (training and static batching are not served).
        """
        if inference_context is None:
            raise RuntimeError(
                "PagedSelfAttention runs only inside the engine: it was called without an "
                "inference_context. Use Megatron-Core's own SelfAttention to train."
            )
        context = attended(self, Stream(hidden_states.flatten(0, 1)), inference_context)
        output, bias = self.linear_proj(context[:, None])
        return output, bias


def stamp_kv_layers(model: nn.Module) -> list[PagedSelfAttention]:
    """Number the paged attention modules of `model` in execution order; return them."""
    modules = [m for m in model.modules() if isinstance(m, PagedSelfAttention)]
    for index, module in enumerate(modules):
        module.kv_layer_index = index
    return modules
