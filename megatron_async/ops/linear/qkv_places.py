"""Where a product by a qkv weight puts its outputs, if it also rotates and appends them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megatron_async.ops.attention.narrow_cache import check_dtypes
from megatron_async.ops.linear.activations import narrow
from megatron_async.ops.linear.product_kernel import Operands, new_sums


@dataclass(frozen=True)
class QkvPlaces:
    """The arguments of `rope_append` behind the rows; without q/k norms and gates, and with heads
    that are rotated as a whole.

    Attributes:
        cos, sin: float32 `[positions, dim]`, contiguous, the tables of `RotaryTable`.
        position_ids: int64 `[tokens]`, rows of the tables; written before the step's first layer.
        write_index: int64 `[tokens]`: place in the cache, block * block size + offset, all
            different; written as early.
        key_cache, value_cache: `[blocks, block size, kv_heads, dim]`, contiguous, dtype of the
            product or e4m3; written in place.
        scales: of caches in e4m3.
    """

    cos: Tensor
    sin: Tensor
    position_ids: Tensor
    write_index: Tensor
    key_cache: Tensor
    value_cache: Tensor
    scales: Tensor | None = None

    @property
    def dim(self) -> int:
        """Elements of a head."""
        return self.key_cache.size(-1)

    def new_queries(self, x: Tensor, outputs: int) -> Tensor:
        """Where the queries of a product of x, `[rows, k]`, go: `[rows, heads, dim]`."""
        heads = outputs // self.dim - 2 * self.key_cache.size(-2)
        return torch.empty((len(x), heads, self.dim), dtype=x.dtype, device=x.device)

    def group(self, outputs: int) -> int:
        """Query heads of each KV head, if a product has so many outputs.

        Raises:
            ValueError: tensors that do not fit each other or the product.
        """
        kv_heads, dim = self.key_cache.shape[-2:]
        group, rest = divmod(outputs, kv_heads * dim)
        group -= 2
        if rest or group < 1 or dim % 2:
            raise ValueError(
                f"qkv product: {outputs} outputs are not {kv_heads} KV heads x (query heads + 2) x "
                f"an even dim {dim}: pass the weight of linear_qkv and this model's KV cache."
            )
        whole = (self.cos, self.sin, self.key_cache, self.value_cache)
        alike = self.cos.shape == self.sin.shape and self.key_cache.shape == self.value_cache.shape
        if self.cos.size(1) != dim or not alike or not all(t.is_contiguous() for t in whole):
            raise ValueError(
                f"qkv product: cos and sin must be [positions, {dim}] and the caches alike, all "
                f"contiguous; found {tuple(self.cos.shape)}, {tuple(self.sin.shape)}, "
                f"{tuple(self.key_cache.shape)} and {tuple(self.value_cache.shape)}."
            )
        return group


NO_SQUARES = {"parts": 0, "block_parts": triton.next_power_of_2(0)}
NO_PLACES = {"kv_heads": 0, "group": 0, "dim": 0}


class Placed(NamedTuple):
    """What kernels get of `QkvPlaces`, of their outputs, and of the squares that exclude places.

    Attributes:
        tensors: from `cos` to `scales`, then where the outputs go.
        constants: of which those of heads are 0 where there are no places.
    """

    tensors: tuple[Tensor, ...]
    constants: dict[str, int]


def place(
    places: QkvPlaces | None, given: Operands, block_n: int, activation: str, splits: int = 1
) -> Placed:
    """What the kernel of a product gets, if each program makes `block_n` outputs.

    Raises:
        ValueError: places that do not fit the product, or this layout of it.
    """
    x, outputs, parts = given.rows, given.outputs, given.parts
    squares = NO_SQUARES
    if parts:
        squares = {"parts": parts, "block_parts": triton.next_power_of_2(parts)}
    if places is None:
        out = new_sums(x, outputs, splits)
        return Placed((x, x, x, x, x, x, x, out), NO_PLACES | squares)
    if activation or parts or places.dim % block_n:
        raise ValueError(
            f"linear_rope_append: programs of {block_n} outputs must divide heads of {places.dim}, "
            f"without an activation ({activation!r}) or squares ({parts})."
        )
    group, rows = places.group(outputs), x.size(0)
    if min(places.position_ids.numel(), places.write_index.numel()) < rows:
        raise ValueError(
            f"qkv product: {rows} rows, and positions of {places.position_ids.numel()} and places "
            f"of {places.write_index.numel()}."
        )
    check_dtypes("qkv product", x.dtype, places.key_cache, places.value_cache, places.scales)
    scales = places.cos if places.scales is None else places.scales
    tensors = (
        places.cos, places.sin, places.position_ids, places.write_index, places.key_cache,
        places.value_cache, scales, places.new_queries(x, outputs),
    )  # fmt: skip
    heads = {"kv_heads": places.key_cache.size(-2), "group": group, "dim": places.dim}
    return Placed(tensors, heads | squares)


@triton.jit
def first_of_pairs(pair: tl.tensor, dim: tl.constexpr) -> tl.tensor:
    """The weight row of the first element of a pair; pairs are numbered through all heads, and the
    second element of each is half a head behind the first."""
    half: tl.constexpr = dim // 2
    return pair // half * dim + pair % half


@gluon.jit
def split_pairs(
    y: gl.tensor, lines: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """First and second elements of pairs, `[lines, columns]` each in a layout. The elements of a
    pair are in one thread, as neighbours or as halves along an axis of y, whose size is twice the
    result's."""
    first, second = gl.split(y.reshape([lines, 2, columns]).permute([0, 2, 1]))
    return gl.convert_layout(first, layout), gl.convert_layout(second, layout)


@triton.jit
def store_heads(
    first: tl.tensor,
    second: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    lane: tl.tensor,
    head: tl.tensor,
    exists: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    scales: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
) -> None:
    """Rotate pairs of one head, as `rope_append` does, and put them where they belong.

    Kernels in Triton and in Gluon call it.

    Outputs are rounded before and after, as two kernels would. `first` and `second`, `cosine` and
    `sine` have one shape; `row`, `place` in the cache and `lane` in the half head reach it.
    """
    dtype: tl.constexpr = query.dtype.element_ty
    kv_head = head // (group + 2)
    member = head % (group + 2)
    first = first.to(dtype)
    second = second.to(dtype)
    cell = (place * kv_heads + kv_head) * dim + lane
    narrows: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv
    if member == group + 1:
        if narrows:
            one_over_scale = tl.load(scales + 3 * kv_heads + kv_head)
            tl.store(value_cache + cell, narrow(first, one_over_scale), mask=exists)
            second_cell = value_cache + cell + dim // 2
            tl.store(second_cell, narrow(second, one_over_scale), mask=exists)
        else:
            tl.store(value_cache + cell, first, mask=exists)
            tl.store(value_cache + cell + dim // 2, second, mask=exists)
    else:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        turned = (a * cosine - b * sine).to(dtype)
        turned_second = (b * cosine + a * sine).to(dtype)
        if member == group:
            if narrows:
                one_over_scale = tl.load(scales + 2 * kv_heads + kv_head)
                tl.store(key_cache + cell, narrow(turned, one_over_scale), mask=exists)
                second_cell = key_cache + cell + dim // 2
                tl.store(second_cell, narrow(turned_second, one_over_scale), mask=exists)
            else:
                tl.store(key_cache + cell, turned, mask=exists)
                tl.store(key_cache + cell + dim // 2, turned_second, mask=exists)
        else:
            target = query + ((row * kv_heads + kv_head) * group + member) * dim + lane
            tl.store(target, turned, mask=exists)
            tl.store(target + dim // 2, turned_second, mask=exists)
