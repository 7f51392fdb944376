"""Sums of a part of the keys, stored by a warpgroup, and joined by the one that comes last.

Written in Gluon, as `warpgroup_attention_kernel.py`, and for the same partial results as Triton's
kernel (`join_parts.py`); here the next part is loaded while one is added, for which the registers
of a warpgroup are enough.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megatron_async.ops.attention import join_parts
from megatron_async.ops.attention.warpgroup_tiles import of_product

add_sink = gluon.jit(join_parts.add_sink.fn)


@gluon.jit
def load_sinks(
    sinks: gl.tensor,
    own: gl.tensor,
    kv_head: gl.tensor,
    count: gl.constexpr,
    group: gl.constexpr,
    sums: gl.constexpr,
) -> gl.tensor:
    """Sinks of the heads of `count` queries from query `own` of a chunk on."""
    query = own + gl.arange(0, count, layout=gl.SliceLayout(1, sums))
    return gl.load(sinks + kv_head * group + query % group)


@gluon.jit
def _load_part(
    sources: gl.tuple,
    slot: gl.tensor,
    end: gl.tensor,
    member: gl.tensor,
    place: gl.tensor,
    queries: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Maxima, totals and sums of one slot; zeros from slot `end` on."""
    part_output, part_maximum, part_total = sources
    row = slot * queries + member
    exists = (member >= 0) & (slot < end)
    # From the second cache: the first one may have what an earlier layer stored there.
    maximum = gl.load(part_maximum + row, mask=exists, other=0.0, cache_modifier=".cg")
    total = gl.load(part_total + row, mask=exists, other=0.0, cache_modifier=".cg")
    dim: gl.constexpr = place.shape[1]
    output = gl.load(
        part_output + slot * queries * dim + place,
        mask=exists[:, None] & (place >= 0),
        other=0.0,
        cache_modifier=".cg",
    )
    return maximum, total, output


@gluon.jit
def join_parts_of_queries(
    partial: gl.tuple,
    gathered: gl.tensor,
    maximum: gl.tensor,
    total: gl.tensor,
    number: gl.constexpr,
    warpgroups: gl.constexpr,
    sinks: gl.tuple,
    own: gl.tensor,
    kv_head: gl.tensor,
    group: gl.constexpr,
    has_sinks: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Store this part's sums; if those of all other parts are stored, also join them. Gives the
    output of the tile's queries, and whether it is there."""
    part_output, part_maximum, part_total, arrived, slot, part, parts = partial
    count: gl.constexpr = gathered.shape[0]
    dim: gl.constexpr = gathered.shape[1]
    layout: gl.constexpr = of_product(dim)
    member = number * count + gl.arange(0, count, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, dim, layout=gl.SliceLayout(0, layout))
    place = member[:, None] * dim + column[None, :]
    queries: gl.constexpr = warpgroups * count
    at = slot * queries
    gl.store(part_maximum + at + member, maximum)
    gl.store(part_total + at + member, total)
    gl.store(part_output + at * dim + place, gathered)
    # All threads of the warpgroup have stored before one counts this part.
    gl.thread_barrier()
    first = slot - part
    counter = arrived + first * warpgroups + number
    is_last = gl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
    if is_last:
        gl.store(counter, 0)
        end = first + parts
        maximum = gl.full([count], -float("inf"), gl.float32, layout=gl.SliceLayout(1, layout))
        total = gl.zeros([count], gl.float32, layout=gl.SliceLayout(1, layout))
        gathered = gl.zeros([count, dim], gl.float32, layout=layout)
        sources = (part_output, part_maximum, part_total)
        next_maximum, next_total, next_output = _load_part(
            sources, first, end, member, place, queries
        )
        for i in range(first, end):
            its_maximum, its_total, its_output = next_maximum, next_total, next_output
            # The next part comes while this one is added.
            next_maximum, next_total, next_output = _load_part(
                sources, i + 1, end, member, place, queries
            )
            new_maximum = gl.maximum(maximum, its_maximum)
            # All queries see the first part, so there is a maximum.
            weight = gl.exp2(its_maximum - new_maximum)
            shrink = gl.exp2(maximum - new_maximum)
            total = total * shrink + its_total * weight
            gathered = gathered * shrink[:, None] + its_output * weight[:, None]
            maximum = new_maximum
        if has_sinks:
            sink = load_sinks(sinks[0], own, kv_head, count, group, layout)
            total = add_sink(total, maximum, sink, 1.0)
        gathered = gathered / total[:, None]
    return gathered, is_last
