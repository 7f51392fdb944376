"""Ops over rows of float32 on a CPU, with the signatures of their references.

Where a tensor is of another kind (a 16-bit dtype, strided, partial sums), or Numba is not there,
the references in plain torch do it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_async.ops.attention import rope_append as rotary
from megatron_async.ops.attention.rope_append import rope_append
from megatron_async.ops.linear import rms_norm
from megatron_async.ops.linear import swiglu as gated
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.linear.swiglu import swiglu
from megatron_async.ops.recurrent.gated_head_norm import gated_head_norm
from megatron_async.ops.recurrent.gated_rms_norm import gated_rms_norm


def serves(*tensors: Tensor | None) -> bool:
    """Whether the loops take these tensors."""
    return all(
        tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
        for tensor in tensors
    )


@add_rms_norm.cpu
def add_rms_norm_cpu(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`ops/linear/rms_norm.py`: the sum of a block's output and the residual stream, and its norm.

    Args:
        x: float32 `[tokens, hidden]`.
        residual: the same shape, or None: `x` is the whole stream.
        weight: float32 `[hidden]`.
        eps: added to the mean square.

    Returns:
        normed, and the new residual.
    """
    if x.dim() != 2 or not serves(x, residual, weight):
        return rms_norm.add_rms_norm.reference(x, residual, weight, eps)
    from megatron_async.ops.cpu import row_kernels

    normed, (rows, hidden) = torch.empty_like(x), x.shape
    if residual is None:
        row_kernels.norm(
            x.data_ptr(), weight.data_ptr(), rows, hidden, np.float32(eps), normed.data_ptr()
        )
        return normed, x
    total = torch.empty_like(x)
    row_kernels.add_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), rows, hidden, np.float32(eps),
        normed.data_ptr(), total.data_ptr(),
    )  # fmt: skip
    return normed, total


@swiglu.cpu
def swiglu_cpu(x: Tensor) -> Tensor:
    """`ops/linear/swiglu.py`: `silu(first half) * second half` of rows, float32 `[tokens, 2 * ffn]`
    -> `[tokens, ffn]`."""
    if not serves(x):
        return gated.swiglu.reference(x)
    from megatron_async.ops.cpu import row_kernels

    rows, width = x.size(0), x.size(1) // 2
    out = torch.empty((rows, width), dtype=torch.float32)
    row_kernels.swiglu(x.data_ptr(), rows, width, out.data_ptr())
    return out


@gated_rms_norm.cpu
def gated_rms_norm_cpu(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """`ops/recurrent/gated_rms_norm.py`: RMSNorm of groups of channels, behind a gate.

    Args:
        y: float32 `[tokens, channels]`; rows may be strided.
        z: like `y`.
        weight: float32 `[channels]`.
        groups: each channels / groups neighbours are normalised together.
        eps: added to the mean square.
    """
    fits = y.dim() == 2 and groups > 0 and y.size(1) % groups == 0 and weight.shape == y.shape[1:]
    if not (fits and _gates(y, z, weight)):
        return gated_rms_norm.reference(y, z, weight, groups, eps)
    from megatron_async.ops.cpu import row_kernels

    (rows, channels), out = y.shape, torch.empty(y.shape, dtype=torch.float32)
    row_kernels.gated_norm(
        y.data_ptr(), 4 * y.stride(0), z.data_ptr(), 4 * z.stride(0), weight.data_ptr(), rows,
        groups, channels // groups, np.float32(eps), out.data_ptr(),
    )  # fmt: skip
    return out


@gated_head_norm.cpu
def gated_head_norm_cpu(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops/recurrent/gated_head_norm.py`: RMSNorm of each head, then a gate.

    Args:
        o: float32 `[tokens, heads * value_dim]`; rows may be strided.
        z: like `o`.
        weight: float32 `[value_dim]`.
        eps: added to the mean square.
    """
    size = weight.numel()
    fits = o.dim() == 2 and weight.dim() == 1 and size > 0 and o.size(1) % size == 0
    if not (fits and _gates(o, z, weight)):
        return gated_head_norm.reference(o, z, weight, eps)
    from megatron_async.ops.cpu import row_kernels

    (rows, channels), out = o.shape, torch.empty(o.shape, dtype=torch.float32)
    row_kernels.head_norm(
        o.data_ptr(), 4 * o.stride(0), z.data_ptr(), 4 * z.stride(0), weight.data_ptr(), rows,
        channels // size, size, np.float32(eps), out.data_ptr(),
    )  # fmt: skip
    return out


def _gates(y: Tensor, z: Tensor, weight: Tensor) -> bool:
    """Whether the loops of gated norms take rows y, gates z and a weight."""
    return (
        y.shape == z.shape
        and y.dtype == z.dtype == torch.float32
        and y.stride(1) == z.stride(1) == 1
        and serves(weight)
    )


@rope_append.cpu
def rope_append_cpu(
    mixed_qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    write_index: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    has_gate: bool = False,
) -> Tensor:
    """`ops/attention/rope_append.py`: rotated queries, `[tokens, heads, dim]`; keys and values go
    to the cache."""
    whole = serves(mixed_qkv, cos, sin, key_cache, value_cache, q_weight, k_weight)
    if not whole or (q_weight is None) != (k_weight is None):
        return rotary.rope_append.reference(
            mixed_qkv, cos, sin, position_ids, write_index, key_cache, value_cache, q_weight,
            k_weight, eps, has_gate,
        )  # fmt: skip
    from megatron_async.ops.cpu import attention_kernels

    kv_heads, dim = key_cache.shape[-2:]
    heads = mixed_qkv.view(mixed_qkv.size(0), kv_heads, -1, dim)
    group = (heads.size(2) - 2) // (2 if has_gate else 1)
    query = mixed_qkv.new_empty((mixed_qkv.size(0), kv_heads * group, dim))
    none = cos[0]  # of the right kind, and not read
    attention_kernels.rope_append(
        heads.numpy(), cos.numpy(), sin.numpy(), position_ids.numpy(), write_index.numpy(),
        key_cache.flatten(0, 1).numpy(), value_cache.flatten(0, 1).numpy(),
        (none if q_weight is None else q_weight.detach()).numpy(),
        (none if k_weight is None else k_weight.detach()).numpy(),
        q_weight is not None, np.float32(eps), group, group if has_gate else 0, query.numpy(),
    )  # fmt: skip
    return query
