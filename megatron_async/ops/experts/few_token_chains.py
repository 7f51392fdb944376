"""`few_token_experts` for the promise "invariant": the bits of a token are those that it has among
many, where norm, routing, grouped products, shared expert and additions are kernels of their own.

Three launches, as of the fast kernels (`few_tokens.py`), but a product is a chain: the matrix units
add 16 inputs at a time to one accumulator along all of a row, whatever the shape of their tile. So
a tile's free rows cost nothing, and may be other experts: the second product of all experts of a
token is one, of which each expert's weight rows keep the sums with its own inputs. What is rounded,
and what is added over threads, is one function with the kernels for many tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import await_previous, launch_options, let_next_start
from megatron_async.ops.experts.expert_mlp import activated_sums
from megatron_async.ops.experts.expert_plan import PROCESSORS, ChainPlan, FewTokenPlan
from megatron_async.ops.experts.expert_routing import (
    BLOCK_K,
    IN_KERNEL_NO_EXPERT,
    Routing,
    powers_and_scores,
    share_of_inputs,
    total_of,
)
from megatron_async.ops.experts.few_tokens import (
    ExpertLayer,
    NormAndGate,
    check_few_tokens,
    few_token_experts,
    new_rows,
)
from megatron_async.ops.experts.shared_gate import gate_logit, gate_of
from megatron_async.ops.linear.activations import round_to, rounded_product
from megatron_async.ops.linear.rms_norm import norm_factor, norm_warps
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.op import promising

COLUMNS = tl.constexpr(8)
"""Rows of inputs that a matrix unit multiplies at least."""
LEAST_KEY = tl.constexpr(-(2**31))


@few_token_experts.gpu
@promising("invariant")
def few_token_chains(
    x: Tensor | Stream,
    layer: ExpertLayer,
    plan: FewTokenPlan | ChainPlan | None,
    places: Tensor | None = None,
    dummy_place: int = 0,
    added: Tensor | None = None,
) -> tuple[Tensor, Routing]:
    """Rounded as Megatron's training does (`expert_mlp.py`)."""
    assert isinstance(plan, ChainPlan), "the caller asked find_plan"
    rows = x.value if isinstance(x, Stream) else x
    check_few_tokens(x, layer, added)
    if rows.dim() == 3 or layer.pre_softmax or layer.has_biases:
        raise ValueError(
            "few_token_experts: no chain takes partial sums, a softmax over all, or biases."
        )
    shape = layer.shape
    tokens, hidden = rows.shape
    dtype, device = layer.fc1.dtype, rows.device
    splits = triton.cdiv(hidden, share_of_inputs(hidden))
    logits = torch.empty((tokens, splits, shape.experts), dtype=torch.float32, device=device)
    gates = torch.empty(tokens, dtype=torch.float32, device=device)
    normed = _norm_and_logits(x, layer, logits, gates)
    routing, activated, shared = new_rows(layer, tokens)
    up, down = plan.up, plan.down
    programs = triton.cdiv(shape.ffn, up.outputs) * shape.topk
    programs += triton.cdiv(shape.shared_ffn, up.outputs)
    chain_up_kernel[(tokens, programs)](
        normed,
        logits,
        routing.experts if places is None else places,
        logits if layer.bias is None else layer.bias,
        layer.fc1,
        layer.fc1 if layer.shared_fc1 is None else layer.shared_fc1,
        activated,
        shared,
        routing.experts,
        routing.weights,
        normed.stride(0),
        0 if places is None else len(places),
        dummy_place,
        float(layer.scale),
        splits=splits,
        experts=shape.experts,
        topk=shape.topk,
        block_experts=max(32, triton.next_power_of_2(shape.experts)),
        block_topk=triton.next_power_of_2(shape.topk),
        hidden=hidden,
        ffn=shape.ffn,
        shared_ffn=shape.shared_ffn,
        block_n=up.outputs,
        block_k=up.inputs,
        gating=layer.gating if shape.gated else None,
        sigmoid=layer.sigmoid,
        has_bias=layer.bias is not None,
        has_places=places is not None,
        num_warps=up.warps,
        num_stages=up.stages,
        **launch_options(rows),
    )
    out = torch.empty((tokens, hidden), dtype=dtype, device=device)
    slots = triton.next_power_of_2(shape.topk)
    chain_down_kernel[(tokens, triton.cdiv(hidden, down.outputs))](
        activated,
        shared,
        layer.fc2,
        layer.fc2 if layer.shared_fc2 is None else layer.shared_fc2,
        routing.experts,
        gates,
        out if added is None else added,
        out,
        0 if added is None else added.stride(0),
        topk=shape.topk,
        hidden=hidden,
        ffn=shape.ffn,
        shared_ffn=shape.shared_ffn,
        slots=slots,
        columns=max(slots, COLUMNS.value),
        block_n=down.outputs,
        block_k=down.inputs,
        longer=shape.longer,
        has_gate=layer.shared_gate is not None,
        has_added=added is not None,
        num_warps=down.warps,
        num_stages=down.stages,
        **launch_options(rows),
    )
    return out, routing


def _norm_and_logits(
    x: Tensor | Stream, layer: ExpertLayer, logits: Tensor, gates: Tensor
) -> Tensor:
    """The normed tokens; fills parts of logits, and logits of the shared expert's gate."""
    given, (_, splits, experts) = NormAndGate(x, layer), logits.shape
    rows, gate = given.rows, given.constants["has_gate"]
    hidden, block = rows.size(1), triton.next_power_of_2(rows.size(1))
    block_experts = max(16, triton.next_power_of_2(triton.cdiv(experts * splits, PROCESSORS)))
    tiles = triton.cdiv(experts, block_experts)
    chain_logits_kernel[(rows.size(0), splits * tiles + gate)](
        *given.tensors,
        logits,
        gates,
        rows.stride(0),
        given.residual_stride,
        given.eps,
        hidden=hidden,
        experts=experts,
        tiles=tiles,
        splits=splits,
        share=share_of_inputs(hidden),
        block=block,
        block_experts=block_experts,
        block_k=BLOCK_K,
        **given.constants,
        num_warps=norm_warps(block),
        **launch_options(rows),
    )
    return given.normed


@triton.jit
def _loaded(
    x: tl.tensor,
    residual: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    dtype: tl.constexpr,
    has_residual: tl.constexpr,
) -> tl.tensor:
    """Elements of a token of the stream, rounded where it is a sum; float32."""
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        before = tl.load(residual + column, mask=inside, other=0.0)
        value = round_to(before.to(tl.float32) + value, dtype)
    return value


@triton.jit
def chain_logits_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    router: tl.tensor,
    gate: tl.tensor,
    logits: tl.tensor,
    gates: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    hidden: tl.constexpr,
    experts: tl.constexpr,
    tiles: tl.constexpr,
    splits: tl.constexpr,
    share: tl.constexpr,
    block: tl.constexpr,
    block_experts: tl.constexpr,
    block_k: tl.constexpr,
    has_norm: tl.constexpr,
    has_residual: tl.constexpr,
    has_gate: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One part of one token's logits of `block_experts` experts, or its logit of the shared
    expert's gate; every program does the norm again, and the first one stores it.

    The layout of the whole row is `_add_rms_norm_kernel`'s, of whose sum the bits are.
    """
    let_next_start(overlap)
    token, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, tile = program % splits, program // splits
    column = tl.arange(0, block)
    inside = column < hidden
    if has_norm:
        scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    expert = tile * block_experts + tl.arange(0, block_experts)
    inner = part * share + tl.arange(0, block_k)
    steps: tl.constexpr = share // block_k
    weights = ()
    scales = ()
    for step in tl.static_range(steps):
        at = inner + step * block_k
        cells = router + expert[:, None] * hidden + at[None, :]
        mask = (expert < experts)[:, None] & (at < hidden)[None, :]
        weights += (tl.load(cells, mask=mask, other=0.0),)  # type: ignore[assignment]
        if has_norm:
            own = tl.load(norm_weight + at, mask=at < hidden, other=0.0).to(tl.float32)
            scales += (own,)  # type: ignore[assignment]
    if has_gate:
        gate_scale = tl.load(gate + column, mask=inside & (tile == tiles), other=0.0)
    await_previous(overlap)
    dtype: tl.constexpr = normed.dtype.element_ty
    own_x, own_residual = x + token * x_stride, residual + token * residual_stride
    value = _loaded(own_x, own_residual, column, inside, dtype, has_residual)
    pieces = ()
    for step in tl.static_range(steps):
        at = inner + step * block_k
        piece = _loaded(own_x, own_residual, at, at < hidden, dtype, has_residual)
        pieces += (piece,)  # type: ignore[assignment]
    row = value
    if has_norm:
        factor = norm_factor(value, hidden, eps)
        row = round_to(value * factor * scale, dtype)
        if program == 0:
            place = token * hidden + column
            if has_residual:
                tl.store(total + place, value.to(dtype), mask=inside)
            tl.store(normed + place, row.to(dtype), mask=inside)
    if tile < tiles:
        first = tl.arange(0, COLUMNS) == 0
        sums = tl.zeros((block_experts, COLUMNS), tl.float32)
        for step in tl.static_range(steps):
            piece = pieces[step]
            if has_norm:
                piece = piece * factor * scales[step]
            v = tl.where(first[:, None], piece[None, :], 0.0).to(dtype)
            sums = tl.dot(weights[step], tl.trans(v), sums, input_precision="ieee")
        found = tl.sum(tl.where(first[None, :], sums, 0.0), 1)
        target = logits + (token * splits + part) * experts + expert
        tl.store(target, found, mask=expert < experts)
    elif has_gate:
        tl.store(gates + token, gate_logit(row, gate_scale.to(tl.float32)))


@triton.jit
def _choose(
    tensors: tl.tuple,
    token: tl.tensor,
    nth: tl.tensor,
    stores: tl.tensor,
    rule: tl.constexpr,
    block: tl.constexpr,
    block_topk: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A token's expert number `nth` and its weight, as `_choose_kernel` finds them, among equals
    the lower number; if `stores`, all are stored.

    Scores are compared as whole numbers, of which a warp finds the largest in one instruction.
    """
    logits, bias, places, out_experts, out_weights, num_places, dummy_place, scale = tensors
    splits: tl.constexpr = rule[0]
    experts: tl.constexpr = rule[1]
    topk: tl.constexpr = rule[2]
    sigmoid: tl.constexpr = rule[3]
    has_bias: tl.constexpr = rule[4]
    has_places: tl.constexpr = rule[5]
    expert = tl.arange(0, block)
    inside = expert < experts
    favour = 0.0
    if has_bias:
        favour = tl.load(bias + expert, mask=inside, other=0.0)
    real = token >= 0
    if has_places:
        real = token < num_places
        real = real & (tl.load(places + token, mask=real, other=0) != dummy_place)
    raw = tl.zeros((block,), tl.float32)
    for part in tl.static_range(splits):  # in `_choose_kernel`'s order; all are asked for at once
        start = logits + (token * splits + part) * experts
        raw += tl.load(start + expert, mask=inside, other=0.0)
    raw = tl.where(inside, raw, float("-inf"))
    powers_of, scores = powers_and_scores(raw, favour, inside, sigmoid, has_bias)
    keys = scores.to(tl.int32, bitcast=True)
    keys = tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    keys = tl.where(scores == scores, keys, LEAST_KEY + 1)
    keys = tl.where(inside, keys, LEAST_KEY)
    rank = tl.arange(0, block_topk)
    chosen = tl.zeros((block_topk,), tl.int32)
    for place in tl.static_range(topk):
        best = tl.max(keys, 0)
        index = tl.min(tl.where(keys == best, expert, block), 0)
        chosen = tl.where(rank == place, index, chosen)
        keys = tl.where(expert == index, LEAST_KEY, keys)
    powers = tl.where(rank < topk, tl.gather(powers_of, chosen, 0), 0.0)
    total = total_of(powers, 1.0, topk, False, sigmoid)
    weights = tl.where(real, powers / total * scale, 0.0)
    if stores:
        target = token * topk + rank
        named = tl.where(real, chosen, IN_KERNEL_NO_EXPERT)
        tl.store(out_experts + target, named, mask=rank < topk)
        tl.store(out_weights + target, weights, mask=rank < topk)
    found = tl.sum(tl.where(rank == nth, chosen, 0), 0)
    share = tl.sum(tl.where(rank == nth, weights, 0.0), 0)
    return tl.where(real, found, IN_KERNEL_NO_EXPERT), share


@triton.jit
def _activated_rows(
    x: tl.tensor,
    start: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    share: tl.tensor,
    n: tl.constexpr,
    sizes: tl.constexpr,
) -> None:
    """A row of x times `count` rows of a weight, from `start` on, and the activation, times
    `share`; the up row of each, if there is a `gating`, is `n` rows behind it."""
    k: tl.constexpr = sizes[0]
    block_n: tl.constexpr = sizes[1]
    block_k: tl.constexpr = sizes[2]
    gating: tl.constexpr = sizes[3]
    gated: tl.constexpr = gating is not None
    line, inner, first = tl.arange(0, block_n), tl.arange(0, block_k), tl.arange(0, COLUMNS) == 0
    dtype: tl.constexpr = out.dtype.element_ty
    is_line, is_first = (line < count)[:, None], first[:, None]
    cells = start + line[:, None] * k + inner[None, :]
    inputs = x + tl.zeros((COLUMNS,), tl.int32)[:, None] + inner[None, :]
    sums = tl.zeros((block_n, COLUMNS), tl.float32)
    ups = tl.zeros((block_n, COLUMNS), tl.float32)
    for at in range(0, k, block_k):
        if k % block_k == 0:
            cell_mask, row_mask = is_line, is_first
        else:
            left = (inner < k - at)[None, :]
            cell_mask, row_mask = is_line & left, is_first & left
        v = tl.load(inputs + at, mask=row_mask, other=0.0)
        w = tl.load(cells + at, mask=cell_mask, other=0.0)
        sums = tl.dot(w, tl.trans(v), sums, input_precision="ieee")
        if gated:
            u = tl.load(cells + n * k + at, mask=cell_mask, other=0.0)
            ups = tl.dot(u, tl.trans(v), ups, input_precision="ieee")
    y = round_to(tl.sum(tl.where(first[None, :], sums, 0.0), 1), dtype)
    up = round_to(tl.sum(tl.where(first[None, :], ups, 0.0), 1), dtype)
    y = activated_sums(y, up, gating, not gated) * share
    tl.store(out + line, y.to(dtype), mask=line < count)


@triton.jit(do_not_specialize=["num_places", "dummy_place"])
def chain_up_kernel(
    x: tl.tensor,
    logits: tl.tensor,
    places: tl.tensor,
    bias: tl.tensor,
    fc1: tl.tensor,
    shared_fc1: tl.tensor,
    activated: tl.tensor,
    shared_activated: tl.tensor,
    out_experts: tl.tensor,
    out_weights: tl.tensor,
    x_stride: tl.tensor,
    num_places: tl.tensor,
    dummy_place: tl.tensor,
    scale: tl.tensor,
    splits: tl.constexpr,
    experts: tl.constexpr,
    topk: tl.constexpr,
    block_experts: tl.constexpr,
    block_topk: tl.constexpr,
    hidden: tl.constexpr,
    ffn: tl.constexpr,
    shared_ffn: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    gating: tl.constexpr,
    sigmoid: tl.constexpr,
    has_bias: tl.constexpr,
    has_places: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One token's `block_n` inner rows, of the shared expert or of one of its experts; in the order
    of `few_up_kernel`, but that tokens are neighbours first."""
    let_next_start(overlap)
    shared: tl.constexpr = (shared_ffn + block_n - 1) // block_n
    height: tl.constexpr = 2 * ffn if gating is not None else ffn
    sizes: tl.constexpr = (hidden, block_n, block_k, gating)
    token, program = tl.program_id(0), tl.program_id(1)
    row = x + token * x_stride
    await_previous(overlap)
    if program < shared:
        begin = program * block_n
        start = shared_fc1 + begin.to(tl.int64) * hidden
        target = shared_activated + token * shared_ffn + begin
        _activated_rows(row, start, target, shared_ffn - begin, 1.0, shared_ffn, sizes)
    else:
        nth = (program - shared) % topk
        first = (program - shared) // topk * block_n
        tensors = (logits, bias, places, out_experts, out_weights, num_places, dummy_place, scale)
        rule: tl.constexpr = (splits, experts, topk, sigmoid, has_bias, has_places)
        stores = (first == 0) & (nth == 0)
        expert, share = _choose(tensors, token, nth, stores, rule, block_experts, block_topk)
        if expert >= 0:
            start = fc1 + (expert.to(tl.int64) * height + first) * hidden
            target = activated + (token * topk + nth) * ffn + first
            _activated_rows(row, start, target, ffn - first, share, ffn, sizes)


@triton.jit
def chain_down_kernel(
    activated: tl.tensor,
    shared_activated: tl.tensor,
    fc2: tl.tensor,
    shared_fc2: tl.tensor,
    experts: tl.tensor,
    gates: tl.tensor,
    added: tl.tensor,
    out: tl.tensor,
    added_stride: tl.tensor,
    topk: tl.constexpr,
    hidden: tl.constexpr,
    ffn: tl.constexpr,
    shared_ffn: tl.constexpr,
    slots: tl.constexpr,
    columns: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    longer: tl.constexpr,
    has_gate: tl.constexpr,
    has_added: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """`block_n` outputs of one token: the sum over its experts in the order of their numbers, then
    the shared one; `added` is added to the rounded sum.

    Line n * slots + s of the tile is output n of expert s; its sums with other experts' inputs are
    dropped. Of a shared expert, whose rows are `longer` times as long, as many steps are longer.
    """
    let_next_start(overlap)
    token, begin = tl.program_id(0), tl.program_id(1) * block_n
    line, inner = tl.arange(0, block_n * slots), tl.arange(0, block_k)
    column, slot = tl.arange(0, columns), line % slots
    row, target = begin + line // slots, begin + tl.arange(0, block_n)
    dtype: tl.constexpr = out.dtype.element_ty
    chosen = experts + token * topk
    wide = tl.arange(0, block_k * longer)
    single = tl.arange(0, COLUMNS) == 0
    shared_cells = shared_fc2 + target[:, None] * shared_ffn + wide[None, :]
    await_previous(overlap)
    if has_added:  # early: at the end, every program would wait for it
        stream = tl.load(added + token * added_stride + target, mask=target < hidden, other=0.0)
    expert = tl.load(chosen + slot, mask=slot < topk, other=-1)
    is_line = ((expert >= 0) & (row < hidden))[:, None]
    # What a pair without an expert has activated was never written.
    is_pair = (tl.load(chosen + column, mask=column < topk, other=-1) >= 0)[:, None]
    cells = fc2 + ((expert.to(tl.int64) * hidden + row) * ffn)[:, None] + inner[None, :]
    inputs = activated + ((token * topk + column) * ffn)[:, None] + inner[None, :]
    own = shared_activated + token * shared_ffn
    shared_inputs = own + tl.zeros((COLUMNS,), tl.int32)[:, None] + wide[None, :]
    number = tl.load(chosen + tl.arange(0, slots), mask=tl.arange(0, slots) < topk, other=-1)
    key = tl.where(number >= 0, number * slots + tl.arange(0, slots), 0x7FFFFFFF)
    sums = tl.zeros((block_n * slots, columns), tl.float32)
    shared_sums = tl.zeros((block_n, COLUMNS), tl.float32)
    for at in range(0, ffn, block_k):
        left = (inner < ffn - at)[None, :]
        v = tl.load(inputs + at, mask=is_pair & left, other=0.0)
        w = tl.load(cells + at, mask=is_line & left, other=0.0)
        sums = tl.dot(w, tl.trans(v), sums, input_precision="ieee")
        if shared_ffn > 0:
            further = at * longer
            rest = (wide < shared_ffn - further)[None, :]
            v = tl.load(shared_inputs + further, mask=single[:, None] & rest, other=0.0)
            w = tl.load(shared_cells + further, mask=(target < hidden)[:, None] & rest, other=0.0)
            shared_sums = tl.dot(w, tl.trans(v), shared_sums, input_precision="ieee")
    y = tl.sum(tl.where(slot[:, None] == column[None, :], sums, 0.0), 1)
    y = tl.reshape(round_to(y, dtype), (block_n, slots))
    place = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
    whole = tl.zeros((block_n,), tl.float32)
    for nth in tl.static_range(topk):
        whole += tl.sum(tl.where((place == nth)[None, :], y, 0.0), 1)
    if shared_ffn > 0:
        whole = round_to(whole, dtype)
        other = round_to(tl.sum(tl.where(single[None, :], shared_sums, 0.0), 1), dtype)
        if has_gate:
            other = rounded_product(other, gate_of(tl.load(gates + token), dtype, True), dtype)
        whole += other
    if has_added:
        whole = round_to(whole, dtype) + stream.to(tl.float32)
    tl.store(out + token * hidden + target, whole.to(dtype), mask=target < hidden)
