"""`PersistentLayers`: all layers of a dense decoder for one row, as one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.ops.persistent.persistent_kernel import persistent_layers_kernel
from megatron_async.ops.persistent.persistent_plan import (
    WARPS,
    LayerSizes,
    PersistentPlan,
    plan_layers,
)


class LayerWeights(NamedTuple):
    """Weights of one layer, bfloat16, contiguous: Megatron's, without biases."""

    qkv: Tensor
    """`[kv heads * (group + 2) * dim, hidden]`: of each KV head its queries, its key, its value."""
    proj: Tensor
    """`[hidden, heads * dim]`"""
    fc1: Tensor
    """`[2 * ffn, hidden]`: all gates, then all ups."""
    fc2: Tensor
    """`[hidden, ffn]`"""
    input_norm: Tensor
    """`[hidden]`"""
    mlp_norm: Tensor
    """`[hidden]`"""


class PersistentLayers:
    """Layers whose weights stay where they are.

    Args:
        layers: weights on one GPU; they must outlive this object, as only addresses are kept.
        sizes: of each layer.
        eps: of the norms.
        scale: of attention's scores.
        plan: None: `plan_layers` for the device.

    Raises:
        ValueError: weights do not fit the sizes, or the kernel does not serve them there.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        sizes: LayerSizes,
        eps: float,
        scale: float,
        plan: PersistentPlan | None = None,
    ) -> None:
        device = layers[0].qkv.device
        for number, layer in enumerate(layers):
            _check(number, layer, sizes, device)
        plan = plan or plan_for(sizes, device)
        if plan is None:
            raise ValueError(
                f"no kernel of all layers for {sizes} on {device}: run the layers one by one."
            )
        self._sizes, self._eps, self._scale, self._plan = sizes, eps, scale, plan
        self._layers = list(layers)
        addresses = [[weight.data_ptr() for weight in layer] for layer in layers]
        kind = torch.int64
        self._table = torch.tensor(addresses, dtype=kind, device=device)  # sync-ok: at the start
        # Words, and behind them the number of the step: saved and restored together, if at all.
        self._state = torch.zeros(plan.words(sizes) + 1, dtype=kind, device=device)

    def run(
        self,
        hidden_states: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor,
        write_index: Tensor,
        cache: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        """The layers of one token of one row. Launches of one object must be one after the other,
        on one stream.

        Args:
            hidden_states: bfloat16 `[1, hidden]`, the embedding.
            cos, sin: float32 `[positions, dim]`, contiguous, the tables of `RotaryTable`.
            position_ids: int64 `[1]`: of the token, the last of its sequence.
            write_index: int64 `[1]`: its place in the cache, block * block size + offset.
            cache: bfloat16 `[layers, 2, blocks, block size, kv heads, dim]`, contiguous; the
                token's keys and values are written.
            block_table: int32 `[blocks]`, of the sequence.

        Returns:
            the residual stream behind the last layer, bfloat16 `[1, hidden]`.

        Raises:
            ValueError: tensors do not fit the layers.
        """
        sizes, plan = self._sizes, self._plan
        wanted = (len(self._layers), 2, *cache.shape[2:4], sizes.kv_heads, sizes.dim)
        if cache.shape != wanted or not cache.is_contiguous() or cache.dtype != torch.bfloat16:
            raise ValueError(
                f"persistent layers: a contiguous bfloat16 cache {wanted} is needed, not "
                f"{tuple(cache.shape)} of {cache.dtype}."
            )
        if hidden_states.shape != (1, sizes.hidden) or hidden_states.dtype != torch.bfloat16:
            raise ValueError(
                f"persistent layers: hidden states must be bfloat16 [1, {sizes.hidden}], not "
                f"{tuple(hidden_states.shape)} of {hidden_states.dtype}: one row is one token."
            )
        tables = (cos, sin)
        if any(t.size(1) != sizes.dim or not t.is_contiguous() for t in tables):
            raise ValueError(
                f"persistent layers: cos and sin must be contiguous [positions, {sizes.dim}], not "
                f"{tuple(cos.shape)} and {tuple(sin.shape)}: heads are rotated as a whole."
            )
        out = torch.empty_like(hidden_states)
        layer_elements = cache.stride(0)
        persistent_layers_kernel[(plan.programs,)](
            hidden_states, out, self._table, self._state[:-1], self._state[-1:], cos, sin,
            position_ids, write_index, cache, block_table, layer_elements, cache.stride(1),
            len(self._layers), self._eps, self._scale,
            **plan.constants(sizes, cache.size(3)),
            num_warps=WARPS,
            # All programs run at once, or none: they wait for each other.
            launch_cooperative_grid=True,
        )  # fmt: skip
        return out


def plan_for(sizes: LayerSizes, device: torch.device) -> PersistentPlan | None:
    """The division on a device; None where the kernel does not serve."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return None  # cp.async is of compute capability 8.0
    found: Any = torch.cuda.get_device_properties(device)
    return plan_layers(sizes, found.multi_processor_count, found.shared_memory_per_block_optin)


def _check(number: int, layer: LayerWeights, sizes: LayerSizes, device: torch.device) -> None:
    hidden, heads = sizes.hidden, sizes.heads * sizes.dim
    shapes = (
        (sizes.qkv, hidden), (hidden, heads), (2 * sizes.ffn, hidden), (hidden, sizes.ffn),
        (hidden,), (hidden,),
    )  # fmt: skip
    for name, weight, shape in zip(LayerWeights._fields, layer, shapes, strict=True):
        is_plain = weight.dtype == torch.bfloat16 and weight.is_contiguous()
        if weight.shape != shape or not is_plain or weight.device != device:
            raise ValueError(
                f"persistent layers: {name} of layer {number} must be contiguous bfloat16 {shape} "
                f"on {device}, not {tuple(weight.shape)} of {weight.dtype} on {weight.device}."
            )
