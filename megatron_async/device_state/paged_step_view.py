"""`PagedStepView`: a pass of a model's layers over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import override

from torch import Tensor

from megatron_async.device_state.kv_cache import PagedKVCache
from megatron_async.models.step_routing import StepRouting
from megatron_async.models.step_view import StepView
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.linear.qkv_places import QkvPlaces
from megatron_async.ops.linear.rounded_rows import RoundedRows


class PagedStepView(StepView):
    """`StepView` over a paged cache.

    Args:
        kv_cache: the cache.
        norm_eps: epsilon of the model's q/k norms.
        attentions: the attention backend of each of the cache's block tables.
        ops: bound for the device.

    Attributes:
        kv_cache, norm_eps, ops: as given.
        rotary: set by a subclass.
        dims, step: valid while a pass runs.
    """

    # Megatron's models ask the context for these. Its own MTP layers never run here.
    num_speculative_tokens = 0
    use_flashinfer_fused_rope = False

    mtp_hidden: Tensor | None = None
    routing: StepRouting | None = None

    def __init__(
        self,
        kv_cache: PagedKVCache,
        norm_eps: float,
        attentions: Sequence[TorchPagedAttention],
        ops: Ops,
    ) -> None:
        self.kv_cache = kv_cache
        self.norm_eps = norm_eps
        self._attentions = attentions
        self.ops = ops

    @override
    def backend(self, layer: int) -> TorchPagedAttention:
        return self._attentions[self.kv_cache.table_of(layer)]

    @property
    @override
    def dummy_place(self) -> int:
        return self.kv_cache.dummy_block * self.kv_cache.block_size

    @override
    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.kv_cache.layer(layer)

    @override
    def attention(
        self,
        layer: int,
        mixed_qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        scale: float | None = None,
        has_gate: bool = False,
        sinks: Tensor | None = None,
        rounded: RoundedRows | None = None,
    ) -> Tensor:
        key_cache, value_cache = self.kv_cache.layer(layer)
        rotary = self.rotary.of(layer)
        query = self.ops.rope_append(
            mixed_qkv,
            rotary.cos,
            rotary.sin,
            self.step.positions,
            self._write_index(layer),
            key_cache,
            value_cache,
            q_norm,
            k_norm,
            self.norm_eps,
            has_gate,
            self.kv_cache.scales_of_layer(layer),
        )
        attended = self.attend(layer, query, scale, sinks, rounded)
        if not has_gate:
            return attended
        return self.ops.output_gate(attended, mixed_qkv, key_cache.size(-2))

    @override
    def qkv_places(self, layer: int) -> QkvPlaces | None:
        key_cache, value_cache = self.kv_cache.layer(layer)
        rotary = self.rotary.of(layer)
        cos, sin = rotary.cos, rotary.sin
        if cos.size(1) != key_cache.size(-1):
            return None
        places = self.step.positions, self._write_index(layer)
        scales = self.kv_cache.scales_of_layer(layer)
        return QkvPlaces(cos, sin, *places, key_cache, value_cache, scales)

    def _write_index(self, layer: int) -> Tensor:
        """Places in the flat KV cache by a layer's table: here the first one."""
        return self.step.write_index

    @override
    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float | None = None,
        sinks: Tensor | None = None,
        rounded: RoundedRows | None = None,
    ) -> Tensor:
        scale = query.size(-1) ** -0.5 if scale is None else scale
        cache = self.kv_cache
        scales = cache.scales_of_layer(layer)
        layer_cache = cache.layer(layer)
        return self.backend(layer).attend(query, *layer_cache, scale, scales, sinks, rounded)

    @override
    def may_round(self, layer: int) -> bool:
        return self.backend(layer).may_round

    def is_static_batching(self) -> bool:
        """Never: the batch changes from step to step."""
        return False

    def is_dynamic_batching(self) -> bool:
        """Always."""
        return True

    def is_decode_only(self) -> bool:
        """Whether every row has one query token."""
        return self.dims.is_decode_only

    def using_cuda_graph_this_step(self) -> bool:
        """Whether Megatron's own graphs are to be used: never, ours span the whole step."""
        return False
