"""The experts' MLPs as grouped matrix products: each token is processed by its chosen experts.

Pairs of a token and one of its experts are sorted by expert into tiles of equal height on the
device (`ops/experts/expert_sort.py`). Both products process these tiles. A further kernel adds the
outputs of a token's experts in a fixed order, so that results are the same in every run. Grids
depend only on the number of tokens: programs of unused tiles end at once. The host reads nothing.

In the fast mode each product is rounded once, behind what follows it, and weights multiply the
experts' outputs. What keeps the promise "invariant" rounds where Megatron's training does: the
first product; the activation times the weight (`weighted_swiglu`); the second product. Outputs are
then added in the order of the experts' numbers.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.experts.expert_plan import ExpertPlan, ProductPlan, plan_experts
from megatron_async.ops.experts.expert_routing import Routing
from megatron_async.ops.experts.expert_sort import SortedPairs, sort_pairs
from megatron_async.ops.linear.activations import (
    SWIGLU,
    Gating,
    round_to,
    squared_relu,
    swiglu,
    unit_of,
)
from megatron_async.ops.linear.cpu.grouped_weight import GroupedExperts
from megatron_async.ops.linear.load_tile import (
    check_kept,
    kept_of_matrix,
    kept_operands,
    kept_sums,
    may_be_loaded,
)
from megatron_async.ops.linear.quantised_weight import QuantisedWeight, widened
from megatron_async.ops.linear.widen import widen
from megatron_async.ops.op import op, promising

COMBINE_BLOCK = 1024
type ExpertWeight = Tensor | QuantisedWeight | GroupedExperts


@op(cpu="experts.cpu.grouped_experts")
def expert_mlp(
    x: Tensor,
    routing: Routing,
    fc1: ExpertWeight,
    fc2: ExpertWeight,
    first_expert: int,
    num_experts: int,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    gating: Gating = SWIGLU,
) -> Tensor:
    """For each token the weighted sum of the outputs of its experts on this rank.

    Args:
        x: `[tokens, hidden]` on a GPU; rows may be strided, elements not.
        routing: of these tokens; experts elsewhere, and `NO_EXPERT`, add nothing.
        fc1: `[local experts, 2 * ffn, hidden]`, [gate; up] of SwiGLU, or `[local experts, ffn,
            hidden]`, whose products are squared where they are positive; same dtype, contiguous.
            A quantised one is multiplied by as it is in the dtype; blocks of a GGUF file, on a CPU,
            with rows rounded as those of other layers are.
        fc2: `[local experts, hidden, ffn]`, the same.
        first_expert: number of the first expert here.
        num_experts: how many there are everywhere.
        bias1: `[local experts, 2 * ffn]` or `[local experts, ffn]`, added to the first products;
            contiguous; or None.
        bias2: `[local experts, hidden]`, added to the second ones before they are weighted; None
            too where another tensor-parallel rank adds it.
        gating: what stands for SwiGLU.

    Returns:
        `[tokens, hidden]`, contiguous.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    fc1, fc2 = _plain(fc1), _plain(fc2)
    _check(x, routing, fc1, fc2, bias1, bias2)
    tokens, topk = routing.experts.shape
    local, gated = fc1.size(0), fc1.size(1) != fc2.size(2)
    expert = routing.experts.flatten() - first_expert
    expert = expert.where((expert >= 0) & (expert < local), local)
    order = expert.argsort(stable=True)
    counts = expert.bincount(minlength=local + 1).tolist()
    outputs = torch.zeros((tokens * topk, x.size(1)), dtype=torch.float32, device=x.device)
    weights = routing.weights.reshape(-1, 1)
    start = 0
    for number, count in enumerate(counts[:local]):
        if count:
            pairs = order[start : start + count]
            b1, b2 = (None if bias is None else bias[number] for bias in (bias1, bias2))
            inner = F.linear(x[pairs // topk], fc1[number], b1)
            inner = swiglu.reference(inner, gating) if gated else squared_relu.reference(inner)
            outputs[pairs] = F.linear(inner, fc2[number], b2).float() * weights[pairs]
        start += count
    return outputs.view(tokens, topk, x.size(1)).sum(1).to(x.dtype)


def _plain(weight: ExpertWeight) -> Tensor:
    if isinstance(weight, Tensor | QuantisedWeight):
        return widened(weight)
    raise TypeError("expert_mlp: a GGUF file's blocks are multiplied by loops alone, on a CPU.")


def expert_mlp_gpu(
    x: Tensor,
    routing: Routing,
    fc1: ExpertWeight,
    fc2: ExpertWeight,
    first_expert: int,
    num_experts: int,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    gating: Gating = SWIGLU,
    as_trained: bool = False,
) -> Tensor:
    """`as_trained`: rounded, weighted and added up where Megatron's training does."""
    assert isinstance(fc1, Tensor | QuantisedWeight)
    assert isinstance(fc2, Tensor | QuantisedWeight)
    fc1, fc2 = _kept_or_widened(fc1, fc2, as_trained)
    gated = fc1.size(1) != fc2.size(2)
    form = fc1.form if isinstance(fc1, QuantisedWeight) else None
    plan = plan_experts(routing.experts.numel(), num_experts, x.element_size(), gated, form)
    more = bias1, bias2, gating
    return expert_mlp_by_plan(x, routing, fc1, fc2, first_expert, plan, as_trained, *more)


expert_mlp.gpu(expert_mlp_gpu)
expert_mlp.gpu(promising("invariant")(partial(expert_mlp_gpu, as_trained=True)))


def expert_mlp_by_plan(
    x: Tensor,
    routing: Routing,
    fc1: Tensor | QuantisedWeight,
    fc2: Tensor | QuantisedWeight,
    first_expert: int,
    plan: ExpertPlan,
    as_trained: bool = False,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    gating: Gating = SWIGLU,
) -> Tensor:
    """`expert_mlp` by a given plan, whose tiles have one height."""
    fc1, fc2 = _kept_or_widened(fc1, fc2, as_trained)
    _check(x, routing, fc1, fc2, bias1, bias2)
    if plan.up.block_m != plan.down.block_m:
        raise ValueError(f"expert_mlp: both products walk over the same tiles; found {plan}.")
    tokens, hidden = x.shape
    local, ffn, topk = fc1.size(0), fc2.size(2), routing.experts.size(1)
    gated = fc1.size(1) != ffn
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    pairs = tokens * topk
    activated = torch.empty((pairs, ffn), dtype=x.dtype, device=x.device)
    for rows, weight in ((x, fc1), (activated, fc2)):
        if isinstance(weight, QuantisedWeight):
            check_kept("expert_mlp", rows, weight)
    sort = sort_pairs(routing, first_expert, local, plan.up.block_m)
    follows = gating if gated else None, not gated
    _product(x, fc1, bias1, activated, routing, sort, topk, plan.up, *follows, as_trained)
    outputs = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    _product(activated, fc2, bias2, outputs, routing, sort, 1, plan.down, None, False, as_trained)
    combine_kernel[(tokens, triton.cdiv(hidden, COMBINE_BLOCK))](
        outputs,
        routing.experts,
        routing.experts.stride(0),
        out,
        first_expert,
        local=local,
        hidden=hidden,
        topk=topk,
        block_topk=triton.next_power_of_2(topk),
        block=COMBINE_BLOCK,
        by_number=as_trained,
        num_warps=4,
        **launch_options(x),
    )
    return out


def _kept_or_widened(
    fc1: Tensor | QuantisedWeight, fc2: Tensor | QuantisedWeight, as_trained: bool
) -> tuple[Tensor | QuantisedWeight, Tensor | QuantisedWeight]:
    """Both weights as they are, or both in their dtype, where the kernel does not know their form,
    or there are two, or products round as in training."""
    forms = [each.form if isinstance(each, QuantisedWeight) else None for each in (fc1, fc2)]
    form = forms[0]
    if form is not None and form == forms[1] and may_be_loaded(form, fc1.dtype) and not as_trained:
        return fc1, fc2
    return widen(fc1), widen(fc2)


def _product(
    x: Tensor,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    out: Tensor,
    routing: Routing,
    sort: SortedPairs,
    pairs_per_row: int,
    plan: ProductPlan,
    gating: Gating | None,
    squared: bool,
    as_trained: bool,
) -> None:
    """One grouped product and its bias: a gated unit follows if there is a `gating`, squared ReLU
    if `squared`, else the pairs' weights."""
    n = out.size(1)
    numbers, kept = kept_operands(weight)
    grid = (sort.most_tiles * triton.cdiv(n, plan.block_n),)
    grouped_product_kernel[grid](
        x,
        x.stride(0),
        numbers,
        out,
        routing.weights,
        routing.weights.stride(0),
        *sort,
        out.size(0),
        sort.most_tiles,
        bias,
        **kept,
        n=n,
        k=x.size(1),
        topk=routing.weights.size(1),
        pairs_per_row=pairs_per_row,
        block_m=plan.block_m,
        block_n=plan.block_n,
        last_n=plan.last_n(n),
        block_k=plan.block_k,
        shares=plan.shares,
        gating=gating,
        squared=squared,
        as_trained=as_trained,
        halves=plan.trimmed,
        by_rows=plan.by_rows,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(x),
    )


def _check(
    x: Tensor,
    routing: Routing,
    fc1: Tensor | QuantisedWeight,
    fc2: Tensor | QuantisedWeight,
    *biases: Tensor | None,
) -> None:
    experts, hidden, ffn = fc2.shape
    known = (experts, 2 * ffn, hidden), (experts, ffn, hidden)
    if fc1.shape not in known or x.dim() != 2 or x.size(1) != hidden:
        raise ValueError(
            "expert_mlp: x must be [tokens, hidden], fc1 [experts, 2 * ffn, hidden] (SwiGLU) or "
            "[experts, ffn, hidden] (squared ReLU) and fc2 [experts, hidden, ffn]; found "
            f"{tuple(x.shape)}, {tuple(fc1.shape)} and {tuple(fc2.shape)}."
        )
    if not x.dtype == fc1.dtype == fc2.dtype or x.stride(1) != 1:
        raise ValueError(
            f"expert_mlp: x ({x.dtype}, strides {x.stride()}), fc1 ({fc1.dtype}) and fc2 "
            f"({fc2.dtype}) must have one dtype, and rows of x adjacent elements."
        )
    if not (fc1.is_contiguous() and fc2.is_contiguous()):
        raise ValueError("expert_mlp: the weights must be contiguous: call .contiguous().")
    for bias, weight in zip(biases, (fc1, fc2), strict=True):
        if bias is not None and (bias.shape != weight.shape[:2] or not bias.is_contiguous()):
            raise ValueError(
                f"expert_mlp: the bias of a weight {tuple(weight.shape)} must be "
                f"{tuple(weight.shape[:2])}, contiguous; found {tuple(bias.shape)}."
            )
    if routing.experts.shape != routing.weights.shape or len(routing.experts) != len(x):
        raise ValueError(
            f"expert_mlp: {len(x)} tokens, but experts {tuple(routing.experts.shape)} and weights "
            f"{tuple(routing.weights.shape)}."
        )


@triton.jit
def activated_sums(
    sums: tl.tensor, up_sums: tl.tensor, gating: tl.constexpr, squared: tl.constexpr
) -> tl.tensor:
    """A gated unit of float32 sums and those of the up rows if there is a `gating`, squared ReLU if
    `squared`."""
    if gating is not None:
        sums = unit_of(sums, up_sums, gating)
    elif squared:
        sums = tl.maximum(sums, 0.0)
        sums = sums * sums
    return sums


@triton.jit
def _product_tile(
    tensors: tl.tuple,
    first_column: tl.tensor,
    sizes: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    """The first `block_m` pairs of a tile times `block_n` rows of one expert's weight."""
    (
        x, x_stride, weight, out, pair_weights, pair_weights_stride, tile_pairs, pairs, kept, bias,
        first_bias,
    ) = tensors  # fmt: skip
    n: tl.constexpr = sizes[0]
    k: tl.constexpr = sizes[1]
    topk: tl.constexpr = sizes[2]
    pairs_per_row: tl.constexpr = sizes[3]
    block_k: tl.constexpr = sizes[4]
    gating: tl.constexpr = sizes[5]
    gated: tl.constexpr = gating is not None
    squared: tl.constexpr = sizes[6]
    as_trained: tl.constexpr = sizes[7]
    form: tl.constexpr = sizes[8]
    shares: tl.constexpr = sizes[9]
    in_pairs: tl.constexpr = sizes[10]
    pair = tl.load(tile_pairs + tl.arange(0, block_m))
    column = first_column + tl.arange(0, block_n)
    real = pair < pairs
    is_row, is_column = real[:, None], (column < n)[:, None]
    if form is not None:
        here = tl.minimum(n - first_column, block_n)
        sums, up_sums = kept_sums(
            x, x_stride, pair // pairs_per_row, real, weight, kept, first_column, here, n, 0, 1,
            k, form, block_n, block_k, shares, gated, in_pairs,
        )  # fmt: skip
        sums, up_sums = tl.trans(sums), tl.trans(up_sums)
    else:
        inner = tl.arange(0, block_k)
        rows = x + (pair // pairs_per_row).to(tl.int64)[:, None] * x_stride + inner[None, :]
        cells = weight + column[:, None] * k + inner[None, :]
        sums = tl.zeros((block_m, block_n), tl.float32)
        up_sums = tl.zeros((block_m, block_n), tl.float32)
        for at in range(0, k, block_k):
            if k % block_k == 0:
                row_mask, cell_mask = is_row, is_column
            else:
                left = (inner < k - at)[None, :]
                row_mask, cell_mask = is_row & left, is_column & left
            v = tl.load(rows + at, mask=row_mask, other=0.0)
            w = tl.load(cells + at, mask=cell_mask, other=0.0)
            sums = tl.dot(v, tl.trans(w), sums, input_precision="ieee")
            if gated:
                u = tl.load(cells + n * k + at, mask=cell_mask, other=0.0)
                up_sums = tl.dot(v, tl.trans(u), up_sums, input_precision="ieee")
    is_weighted: tl.constexpr = (gated or squared) == as_trained
    if bias is not None:
        biases = bias + first_bias + column
        added = tl.load(biases, mask=column < n, other=0.0).to(tl.float32)[None, :]
        # What was weighted before the second product takes its weighted bias.
        if not (is_weighted or gated or squared):
            place = (pair // topk) * pair_weights_stride + pair % topk
            added = added * tl.load(pair_weights + place, mask=real, other=0.0)[:, None]
        sums += added
        if gated:
            further = tl.load(biases + n, mask=column < n, other=0.0).to(tl.float32)
            up_sums += further[None, :]
    if as_trained:
        sums = round_to(sums, out.dtype.element_ty)
        up_sums = round_to(up_sums, out.dtype.element_ty)
    sums = activated_sums(sums, up_sums, gating, squared)
    if is_weighted:
        place = (pair // topk) * pair_weights_stride + pair % topk
        share = tl.load(pair_weights + place, mask=real, other=0.0)
        sums = sums * share[:, None]
    target = out + pair.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_row & (column < n)[None, :])


@triton.jit
def _product_columns(
    tensors: tl.tuple,
    nth: tl.tensor,
    sizes: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    last_n: tl.constexpr,
) -> None:
    """The nth tile of columns, of `last_n` where it is the last one."""
    if last_n < block_n:
        if (nth + 1) * block_n >= sizes[0]:
            _product_tile(tensors, nth * block_n, sizes, block_m, last_n)
        else:
            _product_tile(tensors, nth * block_n, sizes, block_m, block_n)
    else:
        _product_tile(tensors, nth * block_n, sizes, block_m, block_n)


@triton.jit(do_not_specialize=["pairs", "max_tiles"])
def grouped_product_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    pair_weights: tl.tensor,
    pair_weights_stride: tl.tensor,
    num_tiles: tl.tensor,
    tile_experts: tl.tensor,
    sorted_pairs: tl.tensor,
    pairs: tl.tensor,
    max_tiles: tl.tensor,
    bias: tl.tensor | None,
    kept: tl.tuple | None,
    form: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
    topk: tl.constexpr,
    pairs_per_row: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    last_n: tl.constexpr,
    block_k: tl.constexpr,
    shares: tl.constexpr,
    gating: tl.constexpr,
    squared: tl.constexpr,
    as_trained: tl.constexpr,
    halves: tl.constexpr,
    by_rows: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One tile of pairs times `block_n` rows of its expert's weight, `last_n` at their end.

    What follows is a unit if `gating`, squared ReLU if `squared`, else the pairs' weights; if
    `as_trained` the product is rounded, and the weights follow the activation instead. Row of
    pair p is p // pairs_per_row. Neighbouring programs have one weight tile and all pair tiles, so
    that a weight is read from memory once, or, if `by_rows`, one pair tile and all weight tiles. If
    `halves`, a tile whose second half holds no pair is computed as its first half.
    """
    wait_for_previous(overlap)
    columns: tl.constexpr = (n + block_n - 1) // block_n
    if by_rows:
        tile = tl.program_id(0) // columns
        nth = tl.program_id(0) % columns
    else:
        tile = tl.program_id(0) % max_tiles
        nth = tl.program_id(0) // max_tiles
    if tile < tl.load(num_tiles):
        height: tl.constexpr = 2 * n if gating is not None else n
        expert = tl.load(tile_experts + tile).to(tl.int64)
        if form is None:
            own, of_expert = weight + expert * (height * k), kept
        else:
            width: tl.constexpr = k if form.numbers == "FP8" else k // 2
            own = weight + expert * (height * width)
            of_expert = kept_of_matrix(kept, expert, height, k, form)
        tile_pairs = sorted_pairs + tile * block_m
        tensors = (
            x, x_stride, own, out, pair_weights, pair_weights_stride, tile_pairs, pairs, of_expert,
            bias, expert * height,
        )  # fmt: skip
        sizes: tl.constexpr = (
            n, k, topk, pairs_per_row, block_k, gating, squared, as_trained, form, shares, overlap
        )  # fmt: skip
        if halves:
            if tl.load(tile_pairs + block_m // 2) >= pairs:
                _product_columns(tensors, nth, sizes, block_m // 2, block_n, last_n)
            else:
                _product_columns(tensors, nth, sizes, block_m, block_n, last_n)
        else:
            _product_columns(tensors, nth, sizes, block_m, block_n, last_n)


@triton.jit(do_not_specialize=["first_expert"])
def combine_kernel(
    outputs: tl.tensor,
    experts: tl.tensor,
    experts_stride: tl.tensor,
    out: tl.tensor,
    first_expert: tl.tensor,
    local: tl.constexpr,
    hidden: tl.constexpr,
    topk: tl.constexpr,
    block_topk: tl.constexpr,
    block: tl.constexpr,
    by_number: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One token: the sum of its pairs with experts here, in order; if `by_number`, in the order of
    the experts' numbers."""
    wait_for_previous(overlap)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    total = tl.zeros((block,), tl.float32)
    if by_number:
        rank = tl.arange(0, block_topk)
        numbers = tl.load(experts + token * experts_stride + rank, mask=rank < topk, other=-1)
        numbers -= first_expert
        exists = (rank < topk) & (numbers >= 0) & (numbers < local)
        # An expert's number and its place among the token's: no two are equal.
        keys = tl.where(exists, numbers * block_topk + rank, local * block_topk)
        last = -1
    for nth in range(topk):
        if by_number:
            last = tl.min(tl.where(keys > last, keys, local * block_topk), 0)
            here = last < local * block_topk
            start = outputs + (token * topk + last % block_topk) * hidden
        else:
            expert = tl.load(experts + token * experts_stride + nth) - first_expert
            here = (expert >= 0) & (expert < local)
            start = outputs + (token * topk + nth) * hidden
        total += tl.load(start + column, mask=inside & here, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
