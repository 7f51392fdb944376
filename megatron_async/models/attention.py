"""Self-attention over the paged KV cache, as a Megatron-Core module.

`PagedSelfAttention` keeps all parts of Megatron's `SelfAttention` that have parameters (so
checkpoints load unchanged) and replaces its forward. Rotary embedding by position, KV append and
attention read only the step's `StepView`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_async.models.decoder_layer import attended
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.linear import InferenceRowParallelLinear
from megatron_async.models.norm import make_post_norm
from megatron_async.ops.linear.stream import Stream

if TYPE_CHECKING:
    from megatron_async.models.step_view import StepView


class PagedCoreAttention(nn.Module):
    """The `core_attention` that Megatron's layer spec requires.

    `StepView.attention`, which has the KV cache, computes the attention.

    Attributes:
        softmax_offset: float32 `[heads of this rank]`, the learned sinks of
            `softmax_type="learnable"`; else None.
    """

    float32_parameters = ("softmax_offset",)
    softmax_offset: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig | None = None,
        softmax_offset: nn.Parameter | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.tp_group: ProcessGroup | None = getattr(pg_collection, "tp", None)
        if config is not None and config.softmax_type == "learnable":
            heads = config.num_attention_heads // get_pg_size(self.tp_group)
            softmax_offset = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.register_parameter("softmax_offset", softmax_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Megatron's form: ranks share the heads."""
        if self.softmax_offset is None:
            return {}
        place = get_pg_rank(self.tp_group), get_pg_size(self.tp_group)
        lead, key = len(sharded_offsets), f"{prefix}softmax_offset"
        part = ShardedTensor.from_rank_offsets(
            key, self.softmax_offset, *sharded_offsets, (lead, *place), prepend_axis_num=lead
        )
        return {key: part}


class PagedSelfAttention(SelfAttention):
    """Megatron self-attention whose keys and values live in the engine's paged cache.

    `kv_layer_index` is this module's layer in the KV cache. The controller stamps it
    (`stamp_kv_layers`), because Megatron's `layer_number` counts MLP and Mamba layers too.
    """

    kv_layer_index: int = -1
    ops = LayerOps()
    cache_scales: Tensor | None = None
    """Scales of keys and values that are stored in fp8, as `scales_of` makes them for this rank's
    heads; None: the checkpoint has none. No parameter: an update of weights leaves it alone."""
    post_layernorm: nn.RMSNorm | None
    """The norm behind attention, which `LayerKind` runs; or None."""
    _zeros: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.post_layernorm = make_post_norm(self.config)
        if isinstance(self.linear_proj, InferenceRowParallelLinear):
            self.linear_proj.skip_bias_add = False  # the product adds it

    @property
    def sinks(self) -> Tensor | None:
        """Scores of this rank's heads that take part in the softmax and have no value, float32;
        None: there are none."""
        kind = self.config.softmax_type
        if kind == "vanilla":
            return None
        if kind == "learnable":
            offset: Tensor = self.core_attention.softmax_offset
            return offset.flatten().float()
        if self._zeros is None:
            heads, device = self.num_attention_heads_per_partition, self.linear_proj.weight.device
            self._zeros = torch.zeros(heads, device=device)
        return self._zeros

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
