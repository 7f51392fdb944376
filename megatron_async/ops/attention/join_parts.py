"""Parts of a row's attention, joined by their maxima and totals.

A part has the largest score of each head, the sum of its weights by that, and the sum of the values
by the weights. The last program of a row's head, or of a tile of queries, joins them
(`prefill_attention.py`), or a second kernel (`decode_attention.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.ops.dependent_launch import wait_for_previous
from megatron_async.ops.linear.rounded_rows import round_blocks

JOIN_AT_ONCE = 8
"""Parts of their own length that a row's last program asks for at once: one after another, 128 of
them took 44 microseconds (docs/records/one_order.md); not measured."""
JOIN_CHUNK = 16
"""Parts that a program of the second kernel reads at once. Its one warp adds them up without a
barrier: 1.4 microseconds a layer at 1 to 16 rows, where 2 to 4 warps and a pass of its own over all
maxima took 2.8 to 5.6."""


LOG2_E = tl.constexpr(1.4426950408889634)
IN_BITS_OF_TWO = tl.constexpr(0x40000000)
"""2.0 in float32."""


@triton.jit
def is_last_part(counter: tl.tensor, parts: tl.tensor, own: tl.tensor = 1) -> tl.tensor:
    """Whether all `parts` have been stored, this program's `own` the last; `counter` is 0 before
    and after."""
    # All threads have stored before one counts this part.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, own, sem="acq_rel") == parts - own
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def join_one(
    maximum: tl.tensor,
    total: tl.tensor,
    gathered: tl.tensor,
    its_maximum: tl.tensor,
    its_total: tl.tensor,
    output: tl.tensor,
    scale: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The maximum, the total and the sum of values of some parts, `[members]` and `[members, dim]`,
    and of one more. Maxima are of scores before `scale`: a maximum that was multiplied here, and
    not stored, would be fused with the subtraction, and round otherwise."""
    new_maximum = tl.maximum(maximum, its_maximum)
    # A query token may see nothing of a part: its weights are 0, and no NaN.
    base = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    weight = tl.exp2((its_maximum - base) * scale)
    shrink = tl.exp2((maximum - base) * scale)
    # Said, not left to the compiler: each kernel that joins must round alike.
    total = tl.fma(total, shrink, its_total * weight)
    gathered = tl.fma(gathered, shrink[:, None], output * weight[:, None])
    return new_maximum, total, gathered


@triton.jit
def weigh_tile(
    score: tl.tensor, maximum: tl.tensor, total: tl.tensor, scale: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The weights of a tile of keys, the maximum and total of a part with it, and what the part's
    sum of values shrinks by: `score`, `[members, keys]`, before scaling, -inf where a key is not
    seen. The bits of a member do not depend on the number of members, nor on the kernel."""
    new_maximum = tl.maximum(maximum, tl.max(score, 1))
    # A query token may see nothing of a part: its weights are 0, and no NaN.
    base = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    weight = tl.exp2(tl.fma(score, scale, -(base * scale)[:, None]))
    shrink = tl.exp2((maximum - base) * scale)
    # Weights, at most 1, are added up as whole numbers of 2**-22, the last places of 2 to 4: a sum
    # of float32 over threads would have the order of the tile's layout, which the members decide.
    units = tl.sum(tl.cast(weight + 2.0, tl.int32, bitcast=True) - IN_BITS_OF_TWO, 1)
    total = tl.fma(total, shrink, units.to(tl.float32) * 2.0**-22)
    return weight, new_maximum, total, shrink


@triton.jit
def bounded(score: tl.tensor, scale: tl.tensor, softcap: tl.constexpr) -> tl.tensor:
    """`softcap` * tanh(score * scale / `softcap`), of a scale for powers of two; what is bounded
    has the scale LOG2_E. By one exponential, whose error is some 1e-7 of the bound."""
    power = tl.exp2(score * (scale * (2.0 / softcap)))
    return softcap - (2.0 * softcap) / (power + 1.0)


@triton.jit
def add_sink(total: tl.tensor, maximum: tl.tensor, sink: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The total of whole rows with their heads' sinks, scores that have no value. `maximum`: before
    `scale`, which is for powers of two."""
    return total + tl.exp2(tl.fma(-maximum, scale, sink * LOG2_E))


@triton.jit
def add_tile(
    score: tl.tensor,
    v: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    gathered: tl.tensor,
    scale: tl.tensor,
    more: tl.constexpr = 0,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The maximum, total and sum of values of a part, and a tile of keys: `score` as of
    `weigh_tile`; `v`, `[keys, dim]`; the sum is 2^`more` as large."""
    weight, maximum, total, shrink = weigh_tile(score, maximum, total, scale)
    if more > 0:
        weight *= 2.0**more
    gathered = tl.dot(weight.to(v.dtype), v, gathered * shrink[:, None], input_precision="ieee")
    return maximum, total, gathered


@triton.jit
def join_parts(
    part_output: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    first_slot: tl.tensor,
    parts: tl.tensor,
    head: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    at_once: tl.constexpr = 1,
    scale: tl.tensor = 1.0,
    sink: tl.tensor = None,
) -> tl.tensor:
    """Sum of parts in their order, float32 `[members, dim]`: of slots from `first_slot` on, each of
    `heads` rows of `dim`, the rows `head`, whose elements are at `place` where `inside`. Of many
    parts `at_once` are asked for at once. `scale`: of `join_one`. `sink`: of each member, or None;
    it counts once, whatever the parts."""
    members: tl.constexpr = inside.shape[0]
    size: tl.constexpr = inside.shape[1]
    maximum = tl.full((members,), -float("inf"), tl.float32)
    total = tl.zeros((members,), tl.float32)
    gathered = tl.zeros((members, size), tl.float32)
    mine = tl.max(inside.to(tl.int32), 1) > 0
    end = first_slot + parts
    wide = (first_slot * 0).to(tl.int64)  # places of many parts have more than 31 bits
    for first in range(first_slot, end, at_once):
        maxima, totals, outputs = (), (), ()
        for step in tl.static_range(at_once):
            part, has, has_all = first, mine, inside
            if at_once > 1:
                part = wide + first + step
                has, has_all = mine & (part < end), inside & (part < end)
            at = part * heads
            # From the second cache: the first one may have what an earlier layer stored there.
            its = tl.load(part_maximum + at + head, has, -float("inf"), cache_modifier=".cg")
            maxima += (its,)  # type: ignore[assignment]
            its = tl.load(part_total + at + head, has, 0.0, cache_modifier=".cg")
            totals += (its,)  # type: ignore[assignment]
            its = tl.load(part_output + at * dim + place, has_all, 0.0, cache_modifier=".cg")
            outputs += (its,)  # type: ignore[assignment]
        # A part that is not there changes nothing.
        for step in tl.static_range(at_once):
            maximum, total, gathered = join_one(
                maximum, total, gathered, maxima[step], totals[step], outputs[step], scale
            )
    if sink is not None:
        total = add_sink(total, maximum, sink, scale)
    return gathered / tl.maximum(total, 1e-30)[:, None]


@triton.jit
def store_output(
    target: tl.tensor,
    result: tl.tensor,
    inside: tl.tensor,
    nth: tl.tensor,
    is_member: tl.tensor,
    rounding: tl.tuple,
    heads: tl.constexpr,
    query: tl.tensor,
) -> None:
    """Store the output of heads, float32 `[members, dim]`, in the query's dtype; or, if there are
    scales in `rounding`, as a product takes rows in FP8: heads of 128 are blocks. `nth`: of a
    token's `heads` heads, those of all tokens end to end."""
    scales, scale_stride, input_scale = rounding
    dtype: tl.constexpr = query.dtype.element_ty
    if scales is None:
        tl.store(target, result.to(dtype), mask=inside)
    else:
        value = result.to(dtype).to(tl.float32)
        codes, found = round_blocks(value, input_scale, input_scale is not None)
        tl.store(target, codes, mask=inside)
        place = (nth % heads).to(tl.int64) * scale_stride + nth // heads
        tl.store(scales + place, found, mask=is_member)


@triton.jit
def _split_of(
    splits: tl.tensor, unit: tl.tensor, units: tl.tensor, heads: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """First slot and number of parts of a unit, a head of a row; one part behind the last unit."""
    split = splits + unit // heads * 2
    exists = unit < units
    return tl.load(split, mask=exists, other=-1), tl.load(split + 1, mask=exists, other=1)


@triton.jit(do_not_specialize=["scale_stride", "units"])
def join_kernel(
    part_output: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    splits: tl.tensor,
    query: tl.tensor,
    out: tl.tensor,
    rounded_scales: tl.tensor,
    scale_stride: tl.tensor,
    input_scale: tl.tensor,
    sinks: tl.tensor,
    units: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    dim: tl.constexpr,
    dim_tile: tl.constexpr,
    chunk: tl.constexpr,
    is_settled: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One head of one row at a time: the sum of its parts, by their maxima and totals. `heads`:
    those of each of the row's `width` query tokens, end to end."""
    if not is_settled:
        wait_for_previous(overlap)
    unit = tl.program_id(0)
    slot, parts = _split_of(splits, unit, units, heads)
    if is_settled:
        wait_for_previous(overlap)
    column = tl.arange(0, dim_tile)
    while unit < units:
        head = unit % heads
        maximum = -float("inf")
        total = 0.0
        gathered = tl.zeros((dim_tile,), tl.float32)
        if parts > 1:
            for first in range(0, parts, chunk):
                member = first + tl.arange(0, chunk)
                exists = member < parts
                place = (slot + member) * heads + head
                its_maximum = tl.load(part_maximum + place, mask=exists, other=-float("inf"))
                its_total = tl.load(part_total + place, mask=exists, other=0.0)
                cell = place[:, None] * dim + column[None, :]
                loaded = exists[:, None] & (column < dim)[None, :]
                output = tl.load(part_output + cell, mask=loaded, other=0.0)
                new_maximum = tl.maximum(maximum, tl.max(its_maximum, 0))
                # A query token may see nothing of a chunk: its weights are 0, and no NaN.
                base = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
                weight = tl.exp2(its_maximum - base)
                shrink = tl.exp2(maximum - base)
                total = total * shrink + tl.sum(its_total * weight, 0)
                gathered = gathered * shrink + tl.sum(output * weight[:, None], 0)
                maximum = new_maximum
            if sinks is not None:
                total = add_sink(total, maximum, tl.load(sinks + head % (heads // width)), 1.0)
            result = gathered / tl.maximum(total, 1e-30)
            store_output(
                (out + unit * dim + column)[None, :], result[None, :], (column < dim)[None, :],
                unit + tl.arange(0, 1), tl.full((1,), True, tl.int1),
                (rounded_scales, scale_stride, input_scale), heads // width, query,
            )  # fmt: skip
        unit += tl.num_programs(0)
        slot, parts = _split_of(splits, unit, units, heads)
