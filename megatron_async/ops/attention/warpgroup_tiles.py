"""Places of the elements of a warpgroup's tiles: in its threads, in memory, in shared memory.

Written in Gluon, for the kernel of `warpgroup_attention_kernel.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from megatron_async.ops.attention import narrow_tile

# mypy: disable-error-code="assignment"

# As Gluon takes Triton's own functions.
as_halves = gluon.jit(narrow_tile.as_halves.fn)
evens_first = gluon.jit(narrow_tile.evens_first.fn)

IN_SHARED_MEMORY = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
)
"""How queries, keys and values lie there, as the copy engine stores and the matrix units read."""


def words_in_shared_memory(dim: int) -> gl.NVMMASharedLayout:
    """How words of four numbers of 8 bits lie there."""
    return gl.NVMMASharedLayout(swizzle_byte_width=dim, element_bitwidth=32, rank=2)


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


@gluon.constexpr_function
def of_words(dim: int) -> gl.BlockedLayout:
    """Layout in which a thread has adjacent words of a key, of four numbers of 8 bits."""
    return gl.BlockedLayout([1, 4], [512 // dim, dim // 16], [4, 1], [1, 0])


EVEN_AND_ODD = gl.constexpr(
    "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
"""Numbers 0 and 2 of a word, in float16, and 1 and 3."""
IN_ORDER = gl.constexpr(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
"""Numbers 0 and 1 of a word, in float16, and 2 and 3."""


@gluon.jit
def store_widened(
    words: gl.tensor, to: gl.shared_memory_descriptor, are_keys: gl.constexpr
) -> None:
    """Store a tile of a narrow cache, int32 `[keys, dim / 4]`, in float16; of keys even elements
    before odd ones, as queries have them."""
    rows: gl.constexpr = words.shape[0]
    columns: gl.constexpr = words.shape[1] * 2
    code: gl.constexpr = EVEN_AND_ODD if are_keys else IN_ORDER
    one, other = gl.inline_asm_elementwise(
        code, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    pairs = gl.join(one, other)
    if are_keys:
        pairs = pairs.permute((0, 2, 1))
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    to._reinterpret(gl.int32, [rows, columns], layout).store(pairs.reshape((rows, columns)))
    fence_async_shared()
    # All threads of the warpgroup have stored before one says so.
    gl.thread_barrier()


@gluon.jit
def bring_queries(
    found: gl.tensor,
    queries: gl.shared_memory_descriptor,
    layout: gl.constexpr,
    narrow: gl.constexpr,
) -> gl.tensor:
    """Store loaded queries as the product takes them. Gives what their scores are to be multiplied
    by, in `layout`, a row's."""
    count: gl.constexpr = queries.shape[0]
    back = gl.full([count], 1.0, gl.float32, layout=layout)
    if narrow:
        if found.dtype == gl.bfloat16:
            halves, factor = as_halves(found)
            back = gl.convert_layout(factor, layout)
            queries.store(evens_first(halves))
        else:
            queries.store(evens_first(found))
    else:
        queries.store(found)
    fence_async_shared()
    return back


@gluon.jit
def store_output(
    gathered: gl.tensor,
    value_scale: gl.tensor,
    queries: gl.shared_memory_descriptor,
    out: gl.tensor,
    place: gl.tensor,
    exists: gl.tensor,
    narrow: gl.constexpr,
) -> None:
    """Store a warpgroup's output through the place of its queries, so that a thread writes adjacent
    elements."""
    count: gl.constexpr = queries.shape[0]
    dim: gl.constexpr = queries.shape[1]
    dtype: gl.constexpr = out.dtype.element_ty
    if narrow:
        gathered = gathered * value_scale
        there = queries._reinterpret(dtype, [count, dim], queries.layout)
    else:
        there = queries
    there.store(gathered.to(dtype))
    gl.store(out + place, there.load(in_memory(dim)), mask=exists)


@gluon.jit
def seen(position: gl.tensor, key: gl.tensor, window: gl.constexpr) -> gl.tensor:
    """Whether queries at `position` see each key, `[queries, keys]`."""
    found = position[:, None] >= key[None, :]
    if window > 0:
        found = found & (key[None, :] > position[:, None] - window)
    return found


@gluon.jit
def first_whole_tile(
    chunk: gl.tuple,
    first_query: gl.tensor,
    queries: gl.constexpr,
    group: gl.constexpr,
    window: gl.constexpr,
    key_tile: gl.constexpr,
) -> gl.tensor:
    """The first tile of keys before whose keys the window of each of `queries` queries begins."""
    _start, tokens, length = chunk
    last = length - tokens + (first_query + queries - 1) // group
    key = gl.maximum(gl.minimum(last, length - 1) + 1 - window, 0)
    return (key + key_tile - 1) // key_tile


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
