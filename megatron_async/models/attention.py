"""Self-attention over the paged KV cache, as a Megatron-Core module.

`PagedSelfAttention` keeps all parts of Megatron's `SelfAttention` that have parameters (so
checkpoints load unchanged) and replaces its forward. Rotary embedding by position, KV append and
attention read only the step's `StepView`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from megatron_async.models.linear import InferenceColumnParallelLinear
from megatron_async.models.norm import factors_of
from megatron_async.ops.linear.unnormed import Unnormed

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

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        inference_context: StepView | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one step.

        Args:
            hidden_states: `[tokens, 1, hidden]`, compute dtype, on the model's device.
            attention_mask: ignored; causality follows from the view's positions.
            inference_context: the device view of the step.

        Returns:
            output `[tokens, 1, hidden]` and the projection's bias or None.

        Raises:
            RuntimeError: called without a view (training and static batching are not served).
        """
        if inference_context is None:
            raise RuntimeError(
                "PagedSelfAttention runs only inside the engine: it was called without an "
                "inference_context. Use Megatron-Core's own SelfAttention to train."
            )
        query = self._rotated(hidden_states, inference_context)
        if query is not None:
            scale = self.config.softmax_scale
            context = inference_context.attend(self.kv_layer_index, query, scale)
        else:
            mixed_qkv, _unused = self.linear_qkv(hidden_states)
            q_norm, k_norm = self.q_layernorm, self.k_layernorm
            context = inference_context.attention(
                self.kv_layer_index,
                # With sequence parallelism rows of padding stand behind the step's tokens.
                mixed_qkv.squeeze(1)[: inference_context.dims.tokens],
                factors_of(q_norm) if q_norm is not None else None,
                factors_of(k_norm) if k_norm is not None else None,
                self.config.softmax_scale,
                self.config.attention_output_gate,
            )
        output, bias = self.linear_proj(context.view(context.size(0), 1, -1))
        return output, bias

    def _rotated(self, hidden_states: Tensor | Unnormed, view: StepView) -> Tensor | None:
        """Queries, where the projection rotates and appends too."""
        layer, dim = self.linear_qkv, self.hidden_size_per_attention_head
        if self.q_layernorm is not None or self.config.attention_output_gate:
            return None
        if not isinstance(layer, InferenceColumnParallelLinear):
            return None
        places = view.qkv_places(self.kv_layer_index) if layer.rotates(hidden_states, dim) else None
        return None if places is None else layer.forward_rotated(hidden_states, places)


def stamp_kv_layers(model: nn.Module) -> int:
    """Number the paged attention modules of `model` in execution order; return how many there
    are."""
    modules = [m for m in model.modules() if isinstance(m, PagedSelfAttention)]
    for index, module in enumerate(modules):
        module.kv_layer_index = index
    return len(modules)
