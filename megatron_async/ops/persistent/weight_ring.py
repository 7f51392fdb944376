"""All weights that a program multiplies by, in the order of their use, through a ring in shared
memory.

The sequence does not end with a product or a layer: while programs wait for each other's values,
the next weights come. Copies are cp.async, whose elements each thread reads itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

CHUNK = gl.constexpr(256)
"""Inputs that a warp multiplies at a time: eight of each lane, 16 bytes."""


@gluon.jit
def _copy_unit(
    ring: gl.tensor,
    slot: gl.tensor,
    weight: gl.tensor,
    row: gl.tensor,
    fits: gl.tensor,
    unit: gl.tensor,
    inputs: gl.constexpr,
    unit_chunks: gl.constexpr,
    layout: gl.constexpr,
) -> None:
    """Ask for a unit of these rows, `[warps]`."""
    width: gl.constexpr = ring.shape[2]
    column = gl.arange(0, width, gl.SliceLayout(0, layout))
    is_of_unit = column < unit_chunks * CHUNK
    column += unit * (unit_chunks * CHUNK)
    # One copy a unit: the compiler puts a barrier between two copies to the ring.
    async_copy.async_copy_global_to_shared(
        ring.index(slot),
        weight + row[:, None] * inputs + column[None, :],
        mask=fits[:, None] & (is_of_unit & (column < inputs))[None, :],
    )


@gluon.jit
def address_of(table: gl.tensor, layer: gl.tensor, column: gl.constexpr) -> gl.tensor:
    """Pointer to a bfloat16 tensor whose address is in the table."""
    address = gl.load(table + layer * 6 + column)
    return gl.multiple_of(address.to(gl.pointer_type(gl.bfloat16)), 16)


@gluon.jit
def ask_next(
    ring: gl.tensor,
    cursor: gl.tuple,
    table: gl.tensor,
    layers: gl.tensor,
    row: gl.tensor,
    hidden: gl.constexpr,
    ffn: gl.constexpr,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    rows: gl.constexpr,
    unit_chunks: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tuple:
    """Ask for the unit at the cursor, as one group of copies, in the cursor's slot.

    Args:
        ring: bfloat16 `[slots, warps, width]` in shared memory: a unit's chunks, and what makes
            `width` a power of two.
        cursor: (slot, product, number, layer): the place in the ring, and the unit, by its number
            in a layer's product qkv, proj, fc1 or fc2 (0 to 3).
        table: int64 `[layers, 6]`, addresses.
        layers: behind which nothing is asked for.
        row: int32 `[warps]`: each warp's output of a round of `rows` outputs.

    Returns:
        the cursor at the unit after it.
    """
    slot, product, number, layer = cursor
    half: gl.constexpr = dim // 2
    heads: gl.constexpr = kv_heads * group
    pairs: gl.constexpr = kv_heads * (group + 2) * half
    long: gl.constexpr = unit_chunks * CHUNK
    units: gl.constexpr = (hidden + long - 1) // long
    head_units: gl.constexpr = (heads * dim + long - 1) // long
    ffn_units: gl.constexpr = (ffn + long - 1) // long
    end = 0
    if layer < layers:
        if product == 0:
            # First and second row of a pair by turns, which are rotated together.
            unit = number // 2
            pair = row + unit // units * rows
            first = pair // half * dim + pair % half + number % 2 * half
            weight = address_of(table, layer, 0)
            _copy_unit(
                ring, slot, weight, first, pair < pairs, unit % units, hidden, unit_chunks, layout
            )
            end = 2 * ((pairs + rows - 1) // rows) * units
        elif product == 1:
            out = row + number // head_units * rows
            weight = address_of(table, layer, 1)
            _copy_unit(
                ring, slot, weight, out, out < hidden, number % head_units, heads * dim,
                unit_chunks, layout,
            )  # fmt: skip
            end = (hidden + rows - 1) // rows * head_units
        elif product == 2:
            # Gate and up by turns.
            unit = number // 2
            out = row + unit // units * rows
            weight = address_of(table, layer, 2)
            _copy_unit(
                ring, slot, weight, out + number % 2 * ffn, out < ffn, unit % units, hidden,
                unit_chunks, layout,
            )  # fmt: skip
            end = 2 * ((ffn + rows - 1) // rows) * units
        else:
            out = row + number // ffn_units * rows
            weight = address_of(table, layer, 3)
            _copy_unit(
                ring, slot, weight, out, out < hidden, number % ffn_units, ffn, unit_chunks, layout
            )
            end = (hidden + rows - 1) // rows * ffn_units
    async_copy.commit_group()
    number += 1
    if number == end:
        number = 0
        product += 1
        if product == 4:
            product = 0
            layer += 1
    return (slot + 1) % ring.shape[0], product, number, layer


@gluon.jit
def multiply_unit(
    sums: gl.tensor,
    vector: gl.tensor,
    unit: gl.tensor,
    ring: gl.tensor,
    slot: gl.tensor,
    after: gl.constexpr,
    unit_chunks: gl.constexpr,
    layout: gl.constexpr,
    lanes: gl.constexpr,
) -> gl.tensor:
    """Multiply by a unit of the ring, once it has come.

    Args:
        sums: float32 `[warps, 32]`: each lane's.
        vector: float32 `[chunks, CHUNK]` in shared memory, 0 behind the last input.
        unit: of the vector, that belongs to the weights.
        after: units that have been asked for after this one.
        layout, lanes: of `[warps, CHUNK]` and of `sums`.

    Returns:
        the new sums.
    """
    warps: gl.constexpr = ring.shape[1]
    async_copy.wait_group(after)
    for chunk in gl.static_range(unit_chunks):
        inputs = vector.index(unit * unit_chunks + chunk).load(gl.SliceLayout(0, layout))
        weights = ring.index(slot).slice(chunk * CHUNK, CHUNK, 1).load(layout).to(gl.float32)
        products = (weights * inputs[None, :]).reshape([warps, 32, CHUNK // 32])
        sums = sums + gl.convert_layout(gl.sum(products, 2), lanes)
    return sums


@gluon.jit
def multiply_pair(
    first: gl.tensor,
    second: gl.tensor,
    vector: gl.tensor,
    unit: gl.tensor,
    ring: gl.tensor,
    slot: gl.tensor,
    unit_chunks: gl.constexpr,
    layout: gl.constexpr,
    lanes: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Multiply by the ring's two oldest units, which belong to the same inputs.

    Args:
        first, second: sums of the one and of the other, as of `multiply_unit`.
        slot: of the older unit.

    Returns:
        the new sums.
    """
    slots: gl.constexpr = ring.shape[0]
    first = multiply_unit(first, vector, unit, ring, slot, slots - 1, unit_chunks, layout, lanes)
    second = multiply_unit(
        second, vector, unit, ring, (slot + 1) % slots, slots - 2, unit_chunks, layout, lanes
    )
    return first, second
