"""From the qkv projection to attention in one kernel: split, q/k norm, rotary, KV append.

Megatron's modules launch a dozen kernels between `linear_qkv` and attention, and write keys and
values twice. Here one program processes one KV head of one token. It reads the head's query heads,
key and value once, normalises query and key if the model does (Qwen3), and rotates them. It writes
the queries to a tensor, and key and value directly to the paged cache.

All arithmetic between load and store is float32, with one rounding at the end. With 16-bit dtypes
the modules also round between operations (norm, cos and sin, each product). So results differ by
about a unit in the last place; in float32 they agree. What keeps the promise "invariant" rounds
where the modules do (Megatron-Core's without `apply_rope_fusion`), so that an engine's log probs
are near those of training.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.attention.narrow_cache import (
    KEYS,
    VALUES,
    as_bytes,
    check_dtypes,
    narrowed,
)
from megatron_async.ops.cpu.rows import serves
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.linear.activations import narrow, round_to, rounded_product
from megatron_async.ops.op import op, promising


@op
def rope_append(
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
    scales: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, append keys and values to the cache, return the queries.

    Args:
        mixed_qkv: `[tokens, kv_heads * (group + 2) * dim]`, output of `linear_qkv` in Megatron's
            order: for each KV head its `group` query heads, its key, its value. bfloat16, float16
            or float32 on a GPU; rows may be strided, elements not.
        cos, sin: float32 `[positions, rotated]`, the tables of `RotaryTable`; `rotated` is even and
            at most dim. The other elements of a head are left as they are.
        position_ids: int64 `[tokens]`, rows of the tables.
        write_index: int64 `[tokens]`: place in the cache, block * block size + offset, all
            different.
        key_cache, value_cache: `[blocks, block size, kv_heads, dim]`, contiguous; written in place.
            In the dtype of `mixed_qkv`, or e4m3.
        q_weight, k_weight: `[dim]`, RMSNorm weights of query and key heads; both or neither.
        eps: of those norms.
        has_gate: the gates of attention's output, as many heads as queries, stand behind each KV
            head's query heads, where nothing of them is read (`ops/attention/output_gate.py`).
        scales: of caches in e4m3 (`ops/attention/narrow_cache.py`), to which keys and values are
            rounded after the dtype of `mixed_qkv`.

    Returns:
        queries `[tokens, kv_heads * group, dim]`, contiguous, dtype of `mixed_qkv`.

    Raises:
        ValueError: shapes do not match or a tensor that must be contiguous is not.
    """
    kv_heads, dim = key_cache.shape[-2:]
    heads = mixed_qkv.unflatten(1, (kv_heads, -1, dim))
    value = heads[:, :, -1]
    group = (heads.size(2) - 2) // (2 if has_gate else 1)
    query = heads[:, :, :group].flatten(1, 2).to(torch.float32)
    key = heads[:, :, -2].to(torch.float32)
    if q_weight is not None and k_weight is not None:
        query = torch.rms_norm(query, (dim,), q_weight.to(torch.float32), eps)
        key = torch.rms_norm(key, (dim,), k_weight.to(torch.float32), eps)
    cos, sin = cos[position_ids][:, None], sin[position_ids][:, None]
    query, key = apply_rotary_reference(query, key, cos, sin)
    for cache, new, of in (key_cache, key, KEYS), (value_cache, value, VALUES):
        stored = new.to(mixed_qkv.dtype)
        if scales is not None:
            stored = narrowed(stored, scales, of)
        as_bytes(cache).flatten(0, 1).index_copy_(0, write_index, as_bytes(stored))
    return query.to(mixed_qkv.dtype)


def apply_rotary_reference(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Query and key `[tokens, heads, dim]`, whose element i is rotated with element i + rotated / 2
    of its head. cos and sin are `[tokens, 1, rotated]`, of their dtype; elements behind `rotated`
    are left as they are."""
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = cos.size(-1)
    if rotated == x.size(-1):
        return x * cos + _rotate_half(x) * sin
    turned, kept = x[..., :rotated], x[..., rotated:]
    return torch.cat((turned * cos + _rotate_half(turned) * sin, kept), dim=-1)


def _rotate_half(x: Tensor) -> Tensor:
    """`[-second half, first half]` of the last dimension."""
    half = x.size(-1) // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), dim=-1)


def rope_append_gpu(
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
    scales: Tensor | None = None,
    rounds: bool = False,
) -> Tensor:
    """`rounds`: as Megatron's modules do, between operations too."""
    kv_heads, dim = key_cache.shape[-2:]
    tokens, width = mixed_qkv.shape
    group = (width // (kv_heads * dim) - 2) // (2 if has_gate else 1)
    gates = group if has_gate else 0
    _check(mixed_qkv, cos, sin, key_cache, value_cache, group, has_gate, scales)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("rope_append: give both q_weight and k_weight, or neither.")
    query = torch.empty(
        (tokens, kv_heads * group, dim), dtype=mixed_qkv.dtype, device=mixed_qkv.device
    )
    if tokens:
        heads, half = triton.next_power_of_2(group + 2), triton.next_power_of_2(dim // 2)
        _rope_append_kernel[(tokens, kv_heads)](
            mixed_qkv,
            cos,
            sin,
            position_ids,
            write_index,
            key_cache,
            value_cache,
            cos if scales is None else scales,
            q_weight if q_weight is not None else cos,
            k_weight if k_weight is not None else cos,
            query,
            mixed_qkv.stride(0),
            eps,
            kv_heads=kv_heads,
            group=group,
            gates=gates,
            dim=dim,
            rotated=cos.size(1),
            heads=heads,
            half=half,
            has_norm=q_weight is not None,
            rounds=rounds,
            num_warps=min(max(heads * half // 256, 1), 8),
            **launch_options(mixed_qkv),
        )
    return query


rope_append.gpu(rope_append_gpu)
rope_append.gpu(promising("invariant")(partial(rope_append_gpu, rounds=True)))


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
    scales: Tensor | None = None,
) -> Tensor:
    whole = serves(mixed_qkv, cos, sin, key_cache, value_cache, q_weight, k_weight)
    if not whole or (q_weight is None) != (k_weight is None):
        return rope_append.reference(
            mixed_qkv, cos, sin, position_ids, write_index, key_cache, value_cache, q_weight,
            k_weight, eps, has_gate, scales,
        )  # fmt: skip
    from megatron_async.ops.attention.cpu import attention_kernels

    kv_heads, dim = key_cache.shape[-2:]
    tokens, width = mixed_qkv.shape
    heads = mixed_qkv.view(tokens, kv_heads, width // (kv_heads * dim), dim)
    group = (heads.size(2) - 2) // (2 if has_gate else 1)
    query = mixed_qkv.new_empty((tokens, kv_heads * group, dim))
    none = cos[0]  # of the right kind, and not read
    attention_kernels.rope_append(
        heads.numpy(), cos.numpy(), sin.numpy(), position_ids.numpy(), write_index.numpy(),
        key_cache.flatten(0, 1).numpy(), value_cache.flatten(0, 1).numpy(),
        (none if q_weight is None else q_weight.detach()).numpy(),
        (none if k_weight is None else k_weight.detach()).numpy(),
        q_weight is not None, np.float32(eps), group, group if has_gate else 0, query.numpy(),
    )  # fmt: skip
    return query


def _check(
    mixed_qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: int,
    has_gate: bool,
    scales: Tensor | None,
) -> None:
    """Raise on arguments that would read or write the wrong memory."""
    kv_heads, dim = key_cache.shape[-2:]
    width = mixed_qkv.size(1)
    heads = group * (2 if has_gate else 1) + 2
    if group < 1 or width != kv_heads * heads * dim or dim % 2:
        beside = "query heads, as many gates, and 2" if has_gate else "query heads + 2"
        raise ValueError(
            f"rope_append: rows of {width} elements are not {kv_heads} KV heads x ({beside})"
            f" x an even dim {dim}: pass the output of linear_qkv and this model's KV cache."
        )
    rotated = cos.size(1)
    fits = rotated <= dim and rotated % 2 == 0
    if not fits or cos.shape != sin.shape or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"rope_append: cos and sin must be alike, [positions, an even number up to {dim}], and "
            "the caches alike; found "
            f"{tuple(cos.shape)}, {tuple(sin.shape)}, {tuple(key_cache.shape)} and "
            f"{tuple(value_cache.shape)}."
        )
    check_dtypes("rope_append", mixed_qkv.dtype, key_cache, value_cache, scales)
    whole = (cos, sin, key_cache, value_cache)
    if mixed_qkv.stride(1) != 1 or not all(tensor.is_contiguous() for tensor in whole):
        raise ValueError(
            "rope_append: tables and caches must be contiguous and the elements of a qkv row "
            "adjacent: pass whole layers of the cache, not slices of heads."
        )


@triton.jit
def _rope_append_kernel(
    mixed_qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    position_ids: tl.tensor,
    write_index: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    scales: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    query: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    gates: tl.constexpr,
    dim: tl.constexpr,
    rotated: tl.constexpr,
    heads: tl.constexpr,
    half: tl.constexpr,
    has_norm: tl.constexpr,
    rounds: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    # Head h of this program: h < group is a query, group the key, group + 1 the value.
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.arange(0, heads)[:, None]
    lane = tl.arange(0, half)[None, :]
    in_lane = lane < dim // 2
    # Each lane has two elements of a head: a pair to be rotated, or two to be left alone.
    turns = lane < rotated // 2
    if rotated == dim:
        at_first = lane
        at_second = lane + dim // 2
    else:
        at_first = tl.where(turns, lane, lane + rotated // 2)
        at_second = tl.where(turns, lane + rotated // 2, lane + dim // 2)
    inside = (head < group + 2) & in_lane
    stands = kv_head * (group + gates + 2) + head
    if gates:
        stands += tl.where(head < group, 0, gates)
    source = mixed_qkv + token * qkv_stride + stands * dim
    raw_first = tl.load(source + at_first, mask=inside, other=0.0)
    raw_second = tl.load(source + at_second, mask=inside, other=0.0)
    position = tl.load(position_ids + token)
    row = tl.load(write_index + token)
    # The second half of a table's row repeats the first.
    cosine = tl.load(cos + position * rotated + lane, mask=turns, other=0.0)
    sine = tl.load(sin + position * rotated + lane, mask=turns, other=0.0)

    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if has_norm:
        square = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        factor = tl.rsqrt(square / dim + eps)
        q_first = tl.load(q_weight + at_first, mask=in_lane, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight + at_first, mask=in_lane, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight + at_second, mask=in_lane, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight + at_second, mask=in_lane, other=0.0).to(tl.float32)
        first = first * factor * tl.where(head < group, q_first, k_first)
        second = second * factor * tl.where(head < group, q_second, k_second)
    dtype = query.dtype.element_ty
    if rounds:
        first, second = round_to(first, dtype), round_to(second, dtype)
        cosine, sine = round_to(cosine, dtype), round_to(sine, dtype)
        rotated_first = rounded_product(first, cosine, dtype)
        rotated_first = (rotated_first - rounded_product(second, sine, dtype)).to(dtype)
        rotated_second = rounded_product(second, cosine, dtype)
        rotated_second = (rotated_second + rounded_product(first, sine, dtype)).to(dtype)
    else:
        rotated_first = (first * cosine - second * sine).to(dtype)
        rotated_second = (second * cosine + first * sine).to(dtype)
    if rotated != dim:
        rotated_first = tl.where(turns, rotated_first, first.to(dtype))
        rotated_second = tl.where(turns, rotated_second, second.to(dtype))

    is_query = (head < group) & in_lane
    target = query + (token * kv_heads + kv_head) * (group * dim) + head * dim
    tl.store(target + at_first, rotated_first, mask=is_query)
    tl.store(target + at_second, rotated_second, mask=is_query)
    if key_cache.dtype.element_ty == tl.float8e4nv:
        one_over_key = tl.load(scales + 2 * kv_heads + kv_head)
        one_over_value = tl.load(scales + 3 * kv_heads + kv_head)
        rotated_first = narrow(rotated_first, one_over_key)
        rotated_second = narrow(rotated_second, one_over_key)
        raw_first = narrow(raw_first, one_over_value)
        raw_second = narrow(raw_second, one_over_value)
    # The same addresses for every head of the tile; the masks let one head through.
    place = (row * kv_heads + kv_head) * dim + head * 0
    is_key = (head == group) & in_lane
    tl.store(key_cache + place + at_first, rotated_first, mask=is_key)
    tl.store(key_cache + place + at_second, rotated_second, mask=is_key)
    is_value = (head == group + 1) & in_lane
    tl.store(value_cache + place + at_first, raw_first, mask=is_value)
    tl.store(value_cache + place + at_second, raw_second, mask=is_value)
