"""`CompiledLayers`: layers of a dense decoder or a hybrid as one compiled call, on a CPU.

Only where every product has weights that our own loops multiply (`LoopedWeight`): other products
are calls of torch. All other steps and models run module by module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from megatron_async.models.architecture import ATTENTION, MAMBA, MLP
from megatron_async.models.attention import PagedSelfAttention
from megatron_async.models.decoder_layer import LAYER_KINDS, LayerKind
from megatron_async.models.linear import (
    InferenceColumnParallelLinear,
    InferenceRowParallelLinear,
)
from megatron_async.models.mamba import Mamba2Mixer
from megatron_async.models.mlp import InferenceMLP
from megatron_async.models.norm import factors_of
from megatron_async.ops.attention.cpu.host_attention import HostPagedAttention
from megatron_async.ops.cpu.rows import serves
from megatron_async.ops.linear.activations import SWIGLU
from megatron_async.ops.linear.cpu.eight_bit import LoopedWeight
from megatron_async.ops.linear.cpu.helpers import CHUNK_BYTES, helpers_of
from megatron_async.ops.linear.stream import Stream

if TYPE_CHECKING:
    pass


class CompiledLayers:
    """Layers of a `PagedHybridStack` that `can_compile`, by the addresses of their weights."""

    def __init__(self, stack: Any) -> None:
        from megatron_async.ops.cpu import layer_kernels

        layer_kernels.compile_loops()
        config, kinds = stack.config, stack.layer_type_list
        attention = stack.layers[kinds.index(ATTENTION)].self_attention
        self._dim, self._scale = attention.hidden_size_per_attention_head, config.softmax_scale
        self._hidden = config.hidden_size
        self._heads = attention.num_attention_heads_per_partition
        self._kv_heads = attention.num_query_groups_per_partition
        self._eps = LAYER_KINDS[kinds[0]].norm(stack.layers[0]).eps
        # The table has addresses alone, so their tensors must be kept.
        self._kept: list[Any] = []
        self._mixers: list[Any] = []
        self._states: tuple[Any, Any] = (None, None)
        rows = [
            self._row(LAYER_KINDS[kind], kind, layer)
            for kind, layer in zip(kinds, stack.layers, strict=True)
        ]
        self._table = np.array(rows, np.int64)
        assert self._table.shape[1] == len(layer_kernels.COLUMNS)
        self._kernels = layer_kernels

    def _row(self, names: LayerKind, kind: str, layer: Any) -> list[int]:
        """A layer, by `layer_kernels.COLUMNS`."""
        block, number, gated = names.block(layer), 0, 0
        first, last = _linears(kind, block)
        norms = [0, 0]
        if kind == ATTENTION:
            number = block.kv_layer_index
            norms = [self._factors(norm) for norm in (block.q_layernorm, block.k_layernorm)]
        elif kind == MAMBA:
            number = len(self._mixers)
            self._mixers.append(block)
        else:
            gated = int(block.gating is not None)
        return [
            (ATTENTION + MLP + MAMBA).index(kind), self._factors(names.norm(layer)),
            *self._product(first), _weight(first).outputs, *self._product(last), _weight(last).k,
            self._bias(first), *norms, number, gated,
        ]  # fmt: skip

    def serves(self, hidden_states: Tensor, view: Any) -> bool:
        """Whether `run` does this pass: one without long prefill chunks, on the backend of a CPU;
        of a hybrid, one without any."""
        if view is None:
            return False
        backend = view.backend(0)
        return (
            isinstance(backend, HostPagedAttention)
            and view.dims.tokens > 0
            and backend.is_all_rows
            and not view.rotary.others
            and serves(hidden_states, view.rotary.cos)
            and (not self._mixers or self._find_states(view) is not None)
        )

    def _find_states(self, view: Any) -> tuple[Any, np.ndarray, np.ndarray] | None:
        """What `mixing` reads of a step, and of each layer; None: another path does it."""
        if not view.dims.is_decode_only or (found := view.recurrent_decoding()) is None:
            return None
        (index, positions, bases, width), pools = found
        if self._states[0] is not pools:
            self._states = (pools, self._states_of(pools))
        layers = self._states[1]
        fits = (
            layers is not None
            and index.dtype in (torch.int32, torch.int64)
            and (positions.dtype, bases.dtype) == (torch.int64, torch.int32)
            and all(tensor.is_contiguous() for tensor in (index, positions, bases))
            and positions.numel() >= index.numel() * width
        )
        if not fits:
            return None
        state, ring, gates, conv = pools[0]
        sizes = self._mixers[0].sizes
        step = np.array(
            [
                index.data_ptr(), positions.data_ptr(), bases.data_ptr(),
                index.dtype == torch.int64, width, len(state), sizes.heads, sizes.head_dim,
                sizes.groups, sizes.state_dim, ring.size(1), conv.size(1),
                *(4 * pool.stride(0) for pool in (state, ring, gates, conv)),
            ],
            np.int64,
        )  # fmt: skip
        return found, layers, step

    def _states_of(self, pools: Any) -> np.ndarray | None:
        """Addresses of each Mamba-2 layer's parameters and pools; None: the loops do not take
        them."""
        rows, mixers = [], self._mixers
        for block, own in zip(mixers, pools, strict=True):
            parameters = (*block.recurrence, block.norm.weight)
            shape = [pool.stride(0) for pool in own] == [pool.stride(0) for pool in pools[0]]
            whole = all(pool[0].is_contiguous() and pool.dtype == torch.float32 for pool in own)
            if not (shape and whole and serves(*(each.detach() for each in parameters))):
                return None
            rows.append([tensor.data_ptr() for tensor in (*parameters, *own)])
        return np.array(rows, np.int64)

    def run(self, hidden_states: Tensor, view: Any) -> Stream:
        """The layers, of float32 `[tokens, hidden]`: see `PagedHybridStack.run`."""
        from megatron_async.ops.linear.cpu.integer_products import scratch_bytes, whole_tiles

        backend, table, columns = view.backend(0), self._table, self._kernels
        assert isinstance(backend, HostPagedAttention), "see serves"
        decode, rows, hidden = backend.all_rows(), len(hidden_states), self._hidden
        found = self._find_states(view) if self._mixers else None
        states, step = (0, 0) if found is None else (each.ctypes.data for each in found[1:])
        keys, _ = view.keys_and_values(0)
        cos, sin, tiles = view.rotary.cos, view.rotary.sin, whole_tiles(rows)
        outputs = int(table[:, columns.FIRST_OUTPUTS].max())
        inputs = int(table[:, columns.INPUTS].max())
        heads = self._heads * self._dim
        parts = [4 * tiles * width for width in (hidden, outputs, max(heads, inputs), inputs)]
        # Of this call alone: two engines may share a model.
        room = torch.empty(sum(parts) + scratch_bytes(rows, max(hidden, inputs)), dtype=torch.uint8)
        places = np.cumsum([room.data_ptr(), *parts]).tolist()  # sync-ok: NumPy
        out = hidden_states.new_empty(tiles, hidden)
        stream, other = torch.empty_like(hidden_states), torch.empty_like(hidden_states)
        sizes = (hidden, self._heads, self._kv_heads, self._dim, cos.size(1), len(cos))
        batch = (
            rows, *decode.tables.shape, decode.block_size, decode.width, decode.first_key,
            keys.numel() // (self._kv_heads * self._dim), 2 * keys.numel(),
        )  # fmt: skip
        addresses = (
            cos.data_ptr(), sin.data_ptr(), view.step.positions.data_ptr(),
            view.step.write_index.data_ptr(), decode.tables.ctypes.data, decode.last.ctypes.data,
            keys.data_ptr(), hidden_states.data_ptr(), out.data_ptr(), stream.data_ptr(),
            other.data_ptr(), states, step, *places,
        )  # fmt: skip
        scale = self._dim**-0.5 if self._scale is None else self._scale
        gated_eps = self._mixers[0].norm.eps if self._mixers else 0.0
        factors = np.array([self._eps, view.norm_eps, scale, gated_eps], np.float32)
        with helpers_of(torch.get_num_threads()).held() as (control, least):
            columns.run_layers(
                columns.loop_addresses(), control, least, CHUNK_BYTES, table, sizes, batch,
                addresses, factors.ctypes.data,
            )  # fmt: skip
        last = hidden_states if len(table) == 1 else other if len(table) % 2 else stream
        return Stream(out[:rows], last)

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
    served = ATTENTION in kinds and not set(kinds) - set(ATTENTION + MLP + MAMBA)
    if not served or get_pg_size(stack.tp_group) > 1:
        return False
    pairs = list(zip(kinds, stack.layers, strict=True))
    norms = [LAYER_KINDS[kind].norm(layer) for kind, layer in pairs]
    return (
        all(_is_served(kind, LAYER_KINDS[kind].block(layer), config) for kind, layer in pairs)
        and all(serves(factors_of(norm)) for norm in norms)
        and len({norm.eps for norm in norms}) == 1
    )


def _is_served(kind: str, block: Any, config: Any) -> bool:
    kinds = {ATTENTION: PagedSelfAttention, MLP: InferenceMLP, MAMBA: Mamba2Mixer}
    if type(block) is not kinds[kind]:
        return False
    first, last = _linears(kind, block)
    if not (_is_whole(first) and _is_whole(last) and last.bias is None):
        return False
    if kind == MLP:
        has_norm = block.post_layernorm is not None
        return block.gating in (SWIGLU, None) and first.bias is None and not has_norm
    if kind == MAMBA:
        return first.bias is None and block.norm.tp_group is None
    norms = [n for n in (block.q_layernorm, block.k_layernorm) if n is not None]
    return (
        config.softmax_type == "vanilla"
        and block.post_layernorm is None
        and config.window_size is None  # one block table for all layers
        and not config.attention_output_gate
        and all(serves(factors_of(norm)) for norm in norms)
        and len(norms) in (0, 2)
        and (first.bias is None or not first.skip_bias_add)
    )


def _linears(kind: str, block: Any) -> tuple[Any, Any]:
    """The first and the last product of a layer."""
    if kind == ATTENTION:
        return block.linear_qkv, block.linear_proj
    return (block.linear_fc1, block.linear_fc2) if kind == MLP else (block.in_proj, block.out_proj)


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
