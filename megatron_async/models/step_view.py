"""`StepView`: what a model's layers may read, and ask for, during a pass over some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from megatron_async.models.rotary import RotaryTable
from megatron_async.models.step_routing import StepRouting
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.linear.qkv_places import QkvPlaces
from megatron_async.ops.linear.rounded_rows import RoundedRows
from megatron_async.ops.recurrent.mamba_pools import MambaParams
from megatron_async.ops.recurrent.recurrent_pools import DecodeRows, RecurrentPools


class LaidOutTokens(Protocol):
    """Tokens of a pass, int64 `[tokens]` each, decode rows first."""

    @property
    def token_ids(self) -> Tensor:
        """Ids of the tokens."""

    @property
    def positions(self) -> Tensor:
        """Positions in the sequences."""

    @property
    def write_index(self) -> Tensor:
        """Places in the flat KV cache."""


class StepView(Protocol):
    """A pass of layers over tokens: those of a step, or those from which drafts are made. Layers
    get it as their `inference_context`.

    Attributes:
        norm_eps: epsilon of the model's q/k norms.
        rotary: table of the rotary embedding, and those of layers with another one.
        dims: host-known shape of the batch.
        step: its tokens.
        mtp_hidden: `[tokens, hidden]`: what a model with multi-token prediction leaves for it.
        routing: what layers with experts choose, and have to; None: nobody asks.
    """

    norm_eps: float
    rotary: RotaryTable
    dims: BatchDimensions
    step: LaidOutTokens
    mtp_hidden: Tensor | None
    routing: StepRouting | None

    def backend(self, layer: int) -> TorchPagedAttention:
        """The attention backend of a layer of the KV cache, which knows the pass that runs."""

    @property
    def dummy_place(self) -> int:
        """Tokens of no request write to this place of the flat KV cache, the first one of the dummy
        block; only they do."""

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """The caches of one layer: `[blocks, block size, KV heads, dim]`."""

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
        """q/k norm, rotary embedding, KV append and causal attention of one layer.

        Args:
            layer: index in the KV cache.
            mixed_qkv: `[tokens, kv_heads * (group + 2) * dim]`, in Megatron's order: for each KV
                head its query heads, its key, its value.
            q_norm, k_norm: `[dim]`, RMSNorm weights of query and key heads, or None.
            scale: of scores before the softmax; None: one by the root of dim.
            has_gate: `mixed_qkv` has the gates of the output after each KV head's query heads, and
                the output is multiplied by the sigmoids of the gates.
            sinks: float32 `[heads]`, scores that take part in the softmax and have no value.
            rounded: where rows go in FP8, if they `may_round` and there is no gate.

        Returns:
            `[tokens, heads, dim]`; of `rounded` the codes.
        """

    def may_round(self, layer: int) -> bool:
        """Whether attention of one layer can round its rows to FP8 for the next product."""

    def qkv_places(self, layer: int) -> QkvPlaces | None:
        """Where a product by the layer's qkv weight may put its outputs itself, if the layer has
        neither q/k norms nor a gate; None if heads are not rotated as a whole."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float | None = None,
        sinks: Tensor | None = None,
        rounded: RoundedRows | None = None,
    ) -> Tensor:
        """Causal attention of rotated queries `[tokens, heads, dim]`, whose keys and values are in
        the cache; shape, dtype and device of `query`; of `rounded` the codes."""


class RecurrentStepView(StepView, Protocol):
    """A pass over the tokens of a step, which may have recurrent layers."""

    def recurrent(self, layer: int, projected: Tensor, params: Any) -> Tensor:
        """Convolution and recurrence of one recurrent layer (by its index among these): `[tokens,
        ...]`, the output of the layer's first product, -> `[tokens, channels]`, before the gated
        norm. `params` are `MambaParams` or `DeltaParams`."""

    def recurrent_decoding(self) -> tuple[DecodeRows, Sequence[RecurrentPools]] | None:
        """The rows of a step in which all rows decode, and the pools of each recurrent layer, to
        compute all layers at once; None: of other steps."""

    def recurrent_gated(
        self, layer: int, projected: Tensor, params: MambaParams, norm_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`recurrent` of a Mamba-2 layer, its output gated and multiplied by the norm's weight,
        `[channels]`; and `Stream.squares` of this output. Only where `may_gate`."""

    @property
    def may_gate(self) -> bool:
        """Whether all rows of the step decode one query token."""
