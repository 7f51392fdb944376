"""`CompiledLayers`: a dense decoder's layers as one compiled call, for steps on a CPU.

Only where every product has weights that our own loops multiply (`LoopedWeight`): other products
are calls of torch. All other steps and models run module by module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from megatron_async.models.attention import PagedSelfAttention
from megatron_async.models.decoder_layer import LAYER_KINDS
from megatron_async.models.linear import (
    InferenceColumnParallelLinear,
    InferenceRowParallelLinear,
)
from megatron_async.models.mlp import InferenceMLP
from megatron_async.models.norm import factors_of
from megatron_async.ops.attention.cpu.host_attention import HostPagedAttention
from megatron_async.ops.cpu.rows import serves
from megatron_async.ops.linear.activations import SWIGLU
from megatron_async.ops.linear.cpu.eight_bit import LoopedWeight
from megatron_async.ops.linear.cpu.helpers import CHUNK_BYTES, helpers_of
from megatron_async.ops.linear.stream import Stream

if TYPE_CHECKING:
    from megatron_async.models.step_view import StepView


class CompiledLayers:
    """Layers of a `PagedHybridStack` that `can_compile`, by the addresses of their weights."""

    def __init__(self, stack: Any) -> None:
        from megatron_async.ops.cpu import layer_kernels

        layer_kernels.compile_loops()
        config, first = stack.config, stack.layers[0]
        attention, eps = first.self_attention, first.input_layernorm.eps
        dim, self._scale = attention.hidden_size_per_attention_head, config.softmax_scale
        self._hidden, self._ffn = config.hidden_size, _weight(stack.layers[1].mlp.linear_fc2).k
        self._heads = attention.num_attention_heads_per_partition
        self._kv_heads, self._dim = attention.num_query_groups_per_partition, dim
        self._eps = eps
        # The table has addresses alone, so their tensors must be kept.
        self._kept: list[Any] = []
        rows = []
        for mixer, feed in zip(stack.layers[::2], stack.layers[1::2], strict=True):
            block, mlp = mixer.self_attention, feed.mlp
            rows.append([
                self._factors(mixer.input_layernorm),
                *self._product(block.linear_qkv),
                self._bias(block.linear_qkv),
                *(self._factors(norm) for norm in (block.q_layernorm, block.k_layernorm)),
                block.kv_layer_index,
                *self._product(block.linear_proj),
                self._factors(feed.pre_mlp_layernorm),
                *self._product(mlp.linear_fc1),
                *self._product(mlp.linear_fc2),
            ])  # fmt: skip
        self._table = np.array(rows, np.int64)
        assert self._table.shape[1] == len(layer_kernels.COLUMNS)
        self._kernels = layer_kernels

    def serves(self, hidden_states: Tensor, view: StepView | None) -> bool:
        """Whether `run` does this pass: one without long prefill chunks, on the backend of a
        CPU."""
        if view is None:
            return False
        backend = view.backend(0)
        return (
            isinstance(backend, HostPagedAttention)
            and view.dims.tokens > 0
            and backend.is_all_rows
            and not view.rotary.others
            and serves(hidden_states, view.rotary.cos)
        )

    def run(self, hidden_states: Tensor, view: StepView) -> Stream:
        """The layers, of float32 `[tokens, hidden]`: see `PagedHybridStack.run`."""
        from megatron_async.ops.linear.cpu.integer_products import scratch_bytes, whole_tiles

        backend = view.backend(0)
        assert isinstance(backend, HostPagedAttention), "see serves"
        decode, rows, hidden = backend.all_rows(), len(hidden_states), self._hidden
        keys, _ = view.keys_and_values(0)
        cos, sin, tiles = view.rotary.cos, view.rotary.sin, whole_tiles(rows)
        heads = self._heads * self._dim
        widths = (
            hidden, heads + 2 * self._kv_heads * self._dim, heads, heads, 2 * self._ffn, self._ffn,
        )  # fmt: skip
        longest = max(hidden, heads, self._ffn)
        parts = [4 * tiles * width for width in widths]
        # Of this call alone: two engines may share a model.
        room = torch.empty(sum(parts) + scratch_bytes(rows, longest), dtype=torch.uint8)
        places = np.cumsum([room.data_ptr(), *parts]).tolist()  # sync-ok: NumPy
        out = hidden_states.new_empty(tiles, hidden)
        stream, other = torch.empty_like(hidden_states), torch.empty_like(hidden_states)
        sizes = (hidden, self._ffn, self._heads, self._kv_heads, self._dim, cos.size(1), len(cos))
        batch = (
            rows, *decode.tables.shape, decode.block_size, decode.width, decode.first_key,
            keys.numel() // (self._kv_heads * self._dim), 2 * keys.numel(),
        )  # fmt: skip
        addresses = (
            cos.data_ptr(), sin.data_ptr(), view.step.positions.data_ptr(),
            view.step.write_index.data_ptr(), decode.tables.ctypes.data, decode.last.ctypes.data,
            keys.data_ptr(), hidden_states.data_ptr(), out.data_ptr(), stream.data_ptr(),
            other.data_ptr(), *places,
        )  # fmt: skip
        scale = self._dim**-0.5 if self._scale is None else self._scale
        factors = np.array([self._eps, view.norm_eps, scale], np.float32)
        with helpers_of(torch.get_num_threads()).held() as (control, least):
            self._kernels.run_layers(
                self._kernels.loop_addresses(), control, least, CHUNK_BYTES, self._table,
                sizes, batch, addresses, factors.ctypes.data,
            )  # fmt: skip
        return Stream(out[:rows], stream)

    def _factors(self, norm: nn.Module | None) -> int:
        if norm is None:
            return 0
        factors = factors_of(norm)
        self._kept.append(factors)
        return factors.data_ptr()

    def _bias(self, linear: Any) -> int:
        self._kept.append(linear.bias)
        return 0 if linear.bias is None else linear.bias.data_ptr()

    def _product(self, linear: Any) -> tuple[int, int]:
        weight = _weight(linear)
        self._kept.append(weight)
        return weight.address, weight.record.address


def compile_layers(stack: Any) -> CompiledLayers | None:
    """The compiled layers of a `PagedHybridStack`; None where there can be none. Again when its
    weights have changed."""
    return CompiledLayers(stack) if can_compile(stack) else None


def can_compile(stack: Any) -> bool:
    """Whether `CompiledLayers` does what the modules of a `PagedHybridStack` do."""
    kinds, config = stack.layer_type_list, stack.config
    if not kinds or kinds != ["*", "-"] * (len(kinds) // 2) or get_pg_size(stack.tp_group) > 1:
        return False
    pairs = zip(stack.layers[::2], stack.layers[1::2], strict=True)
    norms = [LAYER_KINDS[k].norm(layer) for k, layer in zip(kinds, stack.layers, strict=True)]
    return (
        all(_is_served(mixer.self_attention, feed.mlp, config) for mixer, feed in pairs)
        and all(serves(factors_of(norm)) for norm in norms)
        and len({norm.eps for norm in norms}) == 1
    )


def _is_served(attention: Any, mlp: Any, config: Any) -> bool:
    if type(attention) is not PagedSelfAttention or type(mlp) is not InferenceMLP:
        return False
    norms = [n for n in (attention.q_layernorm, attention.k_layernorm) if n is not None]
    linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    return (
        mlp.gating == SWIGLU
        and config.softmax_type == "vanilla"
        and config.window_size is None  # one block table for all layers
        and not config.attention_output_gate
        and all(serves(factors_of(norm)) for norm in norms)
        and len(norms) in (0, 2)
        and all(_is_whole(linear) for linear in linears)
        and (linears[0].bias is None or not linears[0].skip_bias_add)
        and all(linear.bias is None for linear in linears[1:])
    )


def _is_whole(linear: Any) -> bool:
    """Whether a linear layer is a product that the loops write where they are told to."""
    kinds = (InferenceColumnParallelLinear, InferenceRowParallelLinear)
    packed = getattr(linear, "packed_weight", None)
    return (
        type(linear) in kinds
        and packed is not None
        and packed.looped is not None
        and packed.looped.is_whole
    )


def _weight(linear: Any) -> LoopedWeight:
    weight: LoopedWeight = linear.packed_weight.looped
    return weight
