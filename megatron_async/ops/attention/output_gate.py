"""The gate of attention's output (Qiu et al. 2025, "Gated Attention for Large Language Models",
arXiv 2505.06708; Qwen3-Next has it): each element is multiplied by the sigmoid of a number that
`linear_qkv` makes beside the queries.

Computed in float32 and rounded once. One program takes the query heads of one KV head of one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.op import op, promising


@op
def output_gate(attended: Tensor, mixed_qkv: Tensor, kv_heads: int) -> Tensor:
    """`attended * sigmoid(gate)`.

    Args:
        attended: `[tokens, kv_heads * group, dim]`, contiguous, bfloat16, float16 or float32 on a
            GPU.
        mixed_qkv: `[tokens, kv_heads * (2 * group + 2) * dim]`, same dtype, output of `linear_qkv`
            in Megatron's order: for each KV head its `group` query heads, their gates, its key, its
            value. Rows may be strided, elements not.
        kv_heads: of this rank.

    Returns:
        `[tokens, kv_heads * group, dim]`, contiguous, same dtype.

    Raises:
        ValueError: shapes do not match, or elements are strided.
    """
    group = _group(attended, mixed_qkv, kv_heads)
    grouped = mixed_qkv.unflatten(1, (kv_heads, -1, attended.size(2)))
    gate = grouped[:, :, group : 2 * group].flatten(1, 2)
    wide = torch.promote_types(attended.dtype, torch.float32)
    return (attended.to(wide) * gate.to(wide).sigmoid()).to(attended.dtype)


@output_gate.gpu
@promising("invariant")
def output_gate_gpu(attended: Tensor, mixed_qkv: Tensor, kv_heads: int) -> Tensor:
    group = _group(attended, mixed_qkv, kv_heads)
    tokens, heads, dim = attended.shape
    out = torch.empty((tokens, heads, dim), dtype=attended.dtype, device=attended.device)
    if tokens:
        size = group * dim
        block = triton.next_power_of_2(size)
        _output_gate_kernel[(tokens, kv_heads)](
            attended,
            mixed_qkv,
            out,
            mixed_qkv.stride(0),
            kv_heads=kv_heads,
            size=size,
            dim=dim,
            block=block,
            num_warps=min(max(block // 512, 1), 8),
            **launch_options(attended),
        )
    return out


def _group(attended: Tensor, mixed_qkv: Tensor, kv_heads: int) -> int:
    """Query heads of a KV head."""
    tokens, heads, dim = attended.shape
    width = 2 * (heads + kv_heads) * dim
    if heads % kv_heads or mixed_qkv.shape != (tokens, width):
        raise ValueError(
            f"output_gate: {tuple(attended.shape)} with {kv_heads} KV heads wants a mixed_qkv of "
            f"({tokens}, {width}), queries, gates, keys and values; found "
            f"{tuple(mixed_qkv.shape)}."
        )
    if not attended.is_contiguous() or mixed_qkv.stride(1) != 1:
        raise ValueError(
            "output_gate: attended must be contiguous and elements of a qkv row adjacent: call "
            ".contiguous()."
        )
    return heads // kv_heads


@triton.jit
def _output_gate_kernel(
    attended: tl.tensor,
    mixed_qkv: tl.tensor,
    out: tl.tensor,
    qkv_stride: tl.tensor,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, block)
    inside = element < size
    place = (token * kv_heads + kv_head) * size + element
    value = tl.load(attended + place, mask=inside, other=0.0).to(tl.float32)
    source = mixed_qkv + token * qkv_stride + kv_head * (2 * size + 2 * dim) + size + element
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value / (1.0 + tl.exp(-gate)), mask=inside)
