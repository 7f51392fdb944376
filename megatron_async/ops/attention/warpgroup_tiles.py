"""Places of the elements of a warpgroup's tiles: in its threads, in memory, in shared memory.

Written in Gluon, for the kernel of `warpgroup_attention_kernel.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

# mypy: disable-error-code="assignment"


PIECE = gl.constexpr(16)
"""Keys whose values are cleared at a time."""


@gluon.constexpr_function
def of_product(columns: int) -> gl.NVMMADistributedLayout:
    """Layout in which the matrix units leave 64 rows of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def in_memory(dim: int) -> gl.BlockedLayout:
    """Layout in which a thread has adjacent elements of a query."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def as_factor(columns: int) -> gl.DotOperandLayout:
    """Layout in which they take the rows of weights that meet values of so many columns."""
    return gl.DotOperandLayout(0, of_product(columns), 2)


@gluon.jit
def places(
    first: gl.tensor,
    start: gl.tensor,
    tokens: gl.tensor,
    kv_head: gl.tensor,
    count: gl.constexpr,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Offsets `[count, dim]` of queries from `first` of their chunk on, and which of them exist."""
    layout: gl.constexpr = in_memory(dim)
    # The query heads of a KV head share its keys: they are rows of one tile, token by token.
    local = first + gl.arange(0, count, layout=gl.SliceLayout(1, layout))
    head = kv_head * group + local % group
    row = (start + local // group).to(gl.int64) * (kv_heads * group) + head
    column = gl.arange(0, dim, layout=gl.SliceLayout(0, layout))
    return row[:, None] * dim + column[None, :], (local // group < tokens)[:, None]


@gluon.jit
def again(value: gl.tensor) -> gl.tensor:
    """Value that the compiler takes for another one: what follows from it is computed again, not
    kept in registers."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def clear_behind(
    values: gl.shared_memory_descriptor, kept: gl.tensor, layout: gl.constexpr
) -> None:
    """Zeros for the values of keys `kept` and later, which may be anything."""
    key_tile: gl.constexpr = values.shape[0]
    for i in gl.static_range(key_tile // PIECE):
        if kept < (i + 1) * PIECE:
            piece = values.slice(i * PIECE, PIECE, dim=0)
            key = i * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))[:, None]
            found = piece.load(layout)
            piece.store(gl.where(key < kept, found, gl.zeros_like(found)))
    fence_async_shared()
