"""`StepView`: what a model's layers may read during a pass over some tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from megatron_async.device_state.kv_cache import PagedKVCache
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.linear.qkv_places import QkvPlaces

if TYPE_CHECKING:
    from megatron_async.models.rotary import RotaryTable
    from megatron_async.ops.batch_dimensions import BatchDimensions


class LaidOutTokens(Protocol):
    """Tokens of a pass, int64 `[tokens]` each, decode rows first.

    Attributes:
        token_ids: the ids of the tokens.
        positions: positions in their sequences.
        write_index: places in the flat KV cache.
    """

    token_ids: Tensor
    positions: Tensor
    write_index: Tensor


class StepView:
    """A pass of layers over tokens: those of a step, or those from which drafts are made.

    Args:
        kv_cache: the paged cache.
        norm_eps: epsilon of the model's q/k norms.
        attention: the attention backend.
        ops: of the engine.

    Attributes:
        kv_cache, norm_eps, ops: as given.
        rotary: table of the rotary embedding; set by a subclass.

    Attributes (valid while a pass runs):
        dims: host-known shape of the batch.
        step: its tokens.
        mtp_hidden: `[tokens, hidden]`: what a model with multi-token prediction leaves for it.
    """

    # Megatron's models ask the context for these. Its own MTP layers never run here.
    num_speculative_tokens = 0
    use_flashinfer_fused_rope = False

    rotary: RotaryTable
    dims: BatchDimensions
    step: LaidOutTokens
    mtp_hidden: Tensor | None = None

    def __init__(
        self,
        kv_cache: PagedKVCache,
        norm_eps: float,
        attention: TorchPagedAttention,
        ops: Ops,
    ) -> None:
        self.kv_cache = kv_cache
        self.norm_eps = norm_eps
        self._attention = attention
        self.ops = ops

    @property
    def backend(self) -> TorchPagedAttention:
        """The attention backend, which knows the pass that runs."""
        return self._attention

    @property
    def dummy_place(self) -> int:
        """Tokens of no request write to this place of the flat KV cache, the first one of the dummy
        block; only they do."""
        return self.kv_cache.dummy_block * self.kv_cache.block_size

    def attention(
        self,
        layer: int,
        mixed_qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        scale: float | None = None,
        has_gate: bool = False,
    ) -> Tensor:
        """q/k norm, rotary embedding, KV append and causal attention of one layer.

        Args:
            layer: index in the KV cache.
            mixed_qkv: `[tokens, kv_heads * (group + 2) * dim]`, in Megatron's order: for each KV
                head its query heads, its key, its value.
            q_norm, k_norm: `[dim]`, RMSNorm weights of query and key heads, or None.
            scale: of scores before the softmax; None: one by the root of dim.
            has_gate: `mixed_qkv` has the gates of the output after each KV head's query heads, and
                the output is multiplied by the sigmoids of the gates.

        Returns:
            `[tokens, heads, dim]`.
        """
        key_cache, value_cache = self.kv_cache.layer(layer)
        query = self.ops.rope_append(
            mixed_qkv,
            self.rotary.cos,
            self.rotary.sin,
            self.step.positions,
            self.step.write_index,
            key_cache,
            value_cache,
            q_norm,
            k_norm,
            self.norm_eps,
            has_gate,
        )
        attended = self.attend(layer, query, scale)
        if not has_gate:
            return attended
        return self.ops.output_gate(attended, mixed_qkv, key_cache.size(-2))

    def qkv_places(self, layer: int) -> QkvPlaces | None:
        """Where a product by the layer's qkv weight may put its outputs itself, if the layer has
        neither q/k norms nor a gate; None if heads are not rotated as a whole."""
        key_cache, value_cache = self.kv_cache.layer(layer)
        cos, sin = self.rotary.cos, self.rotary.sin
        if cos.size(1) != key_cache.size(-1):
            return None
        step = self.step
        return QkvPlaces(cos, sin, step.positions, step.write_index, key_cache, value_cache)

    def attend(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """Causal attention of rotated queries `[tokens, heads, dim]`, whose keys and values are in
        the cache; shape, dtype and device of `query`."""
        scale = query.size(-1) ** -0.5 if scale is None else scale
        return self._attention.attend(query, *self.kv_cache.layer(layer), scale)

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
