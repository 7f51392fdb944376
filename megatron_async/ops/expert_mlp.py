"""The experts' gated MLPs as grouped matrix products: each token meets the experts it was sent to.

The (token, expert) pairs are sorted by expert into tiles of equal height on the device
(`ops/expert_kernels.py`) and both products walk over these tiles; of few pairs each program finds
its own. The outputs of a token's experts stay apart: who reads them adds them up, in their order
(`ops/expert_sums.py`), so that results do not depend on the run. Grids depend on the number of
tokens only: programs without a tile end at once. Nothing is read back.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.expert_kernels import grouped_product_kernel, sort_kernel
from megatron_async.ops.expert_plan import (
    ExpertPlan,
    ProductPlan,
    most_tiles,
    plan_experts,
    tile_walkers,
)
from megatron_async.ops.expert_routing import Routing
from megatron_async.ops.expert_sums import ExpertOutputs
from megatron_async.ops.swiglu import swiglu_reference

SORT_CHUNK = 2048
"""Pairs that a program holds in registers."""
FEW_PAIRS = 64
"""Up to so many pairs each program looks for its own: that takes it as long as reading the tiles of
a sort does, and the sort's kernel is saved."""


def expert_mlp(
    x: Tensor,
    routing: Routing,
    fc1: Tensor,
    fc2: Tensor,
    first_expert: int,
    num_experts: int,
) -> ExpertOutputs:
    """For each token what its experts here make of it, weighted.

    Args:
        x: `[tokens, hidden]` on a GPU; rows may be strided, elements not.
        routing: of these tokens; experts elsewhere, and `NO_EXPERT`, add nothing.
        fc1: `[local experts, 2 * ffn, hidden]`, [gate; up], same dtype, contiguous.
        fc2: `[local experts, hidden, ffn]`, the same.
        first_expert: number of the first expert here.
        num_experts: how many there are everywhere.

    Returns:
        outputs whose sums are `[tokens, hidden]` of the dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    plan = plan_experts(routing.experts.numel(), num_experts, x.element_size())
    return expert_mlp_by_plan(x, routing, fc1, fc2, first_expert, num_experts, plan)


def expert_mlp_by_plan(
    x: Tensor,
    routing: Routing,
    fc1: Tensor,
    fc2: Tensor,
    first_expert: int,
    num_experts: int,
    plan: ExpertPlan,
    few_pairs: int = FEW_PAIRS,
) -> ExpertOutputs:
    """`expert_mlp` by a given plan; up to `few_pairs` pairs are not sorted.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or the plan's tiles differ in height.
    """
    _check(x, routing, fc1, fc2)
    if plan.up.block_m != plan.down.block_m:
        raise ValueError(f"expert_mlp: both products walk over the same tiles; found {plan}.")
    tokens, hidden = x.shape
    local, ffn, topk = fc1.size(0), fc2.size(2), routing.experts.size(1)
    pairs = tokens * topk
    outputs = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    found = ExpertOutputs(outputs, routing.experts, first_expert, local, x.dtype)
    if not tokens:
        return found
    height = plan.up.block_m
    is_few = pairs <= few_pairs
    sort = (routing.experts,) * 3 if is_few else _sort(routing, first_expert, local, height)
    activated = torch.empty((pairs, ffn), dtype=x.dtype, device=x.device)
    product = partial(_product, routing, sort, is_few, first_expert, num_experts)
    product(x, fc1, activated, topk, plan.up, True)
    product(activated, fc2, outputs, 1, plan.down, False)
    return found


def expert_mlp_reference(
    x: Tensor,
    routing: Routing,
    fc1: Tensor,
    fc2: Tensor,
    first_expert: int,
    num_experts: int,
) -> ExpertOutputs:
    """The same in plain torch, its rows float32; it reads sizes back, so it is for the CPU and for
    tests."""
    _check(x, routing, fc1, fc2)
    tokens, topk = routing.experts.shape
    local = fc1.size(0)
    expert = routing.experts.flatten() - first_expert
    expert = expert.where((expert >= 0) & (expert < local), local)
    order = expert.argsort(stable=True)
    counts = expert.bincount(minlength=local + 1).tolist()  # sync-ok: on the CPU
    outputs = torch.zeros((tokens * topk, x.size(1)), dtype=torch.float32, device=x.device)
    weights = routing.weights.reshape(-1, 1)
    start = 0
    for number, count in enumerate(counts[:local]):
        if count:
            pairs = order[start : start + count]
            activated = swiglu_reference(F.linear(x[pairs // topk], fc1[number]))
            outputs[pairs] = F.linear(activated, fc2[number]).float() * weights[pairs]
        start += count
    return ExpertOutputs(outputs, routing.experts, first_expert, local, x.dtype)


def _sort(
    routing: Routing, first_expert: int, local: int, height: int
) -> tuple[Tensor, Tensor, Tensor]:
    """How many tiles there are, the expert of each, and its pairs."""
    experts = routing.experts
    pairs, topk = experts.numel(), experts.size(1)
    tiles = most_tiles(pairs, local, height)
    # Tensors of their own, because Triton compiles a kernel anew for another alignment.
    num_tiles, tile_experts, sorted_pairs = (
        torch.empty(size, dtype=torch.int32, device=experts.device)
        for size in (1, tiles, tiles * height)
    )
    chunk = min(SORT_CHUNK, max(32, triton.next_power_of_2(pairs)))
    sort_kernel[(local,)](
        experts,
        experts.stride(0),
        num_tiles,
        tile_experts,
        sorted_pairs,
        pairs,
        first_expert,
        local=local,
        bins=triton.next_power_of_2(local + 1),
        topk=topk,
        block_m=height,
        chunk=chunk,
        once=pairs <= chunk,
        num_warps=8 if chunk > 512 else 4,
        **launch_options(experts),
    )
    return num_tiles, tile_experts, sorted_pairs


def _product(
    routing: Routing,
    sort: tuple[Tensor, ...],
    is_few: bool,
    first_expert: int,
    num_experts: int,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    pairs_per_row: int,
    plan: ProductPlan,
    gated: bool,
) -> None:
    """One grouped product: SwiGLU follows if `gated`, else the pairs' weights."""
    (pairs, n), local = out.shape, weight.size(0)
    columns = triton.cdiv(n, plan.block_n)
    walkers = tile_walkers(pairs, local, num_experts, plan.block_m, columns)
    grid = (walkers * columns,)
    grouped_product_kernel[grid](
        x,
        x.stride(0),
        weight,
        out,
        routing.weights,
        routing.weights.stride(0),
        routing.experts,
        routing.experts.stride(0),
        *sort,
        pairs,
        walkers,
        first_expert,
        local=local,
        n=n,
        k=x.size(1),
        topk=routing.weights.size(1),
        pairs_per_row=pairs_per_row,
        lanes=max(16, triton.next_power_of_2(pairs)) if is_few else 0,
        block_m=plan.block_m,
        block_n=plan.block_n,
        block_k=plan.block_k,
        gated=gated,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(x),
    )


def _check(x: Tensor, routing: Routing, fc1: Tensor, fc2: Tensor) -> None:
    experts, hidden, ffn = fc2.shape
    if fc1.shape != (experts, 2 * ffn, hidden) or x.dim() != 2 or x.size(1) != hidden:
        raise ValueError(
            "expert_mlp: x must be [tokens, hidden], fc1 [experts, 2 * ffn, hidden] and fc2 "
            f"[experts, hidden, ffn]; found {tuple(x.shape)}, {tuple(fc1.shape)} and "
            f"{tuple(fc2.shape)}."
        )
    if not x.dtype == fc1.dtype == fc2.dtype or x.stride(1) != 1:
        raise ValueError(
            f"expert_mlp: x ({x.dtype}, strides {x.stride()}), fc1 ({fc1.dtype}) and fc2 "
            f"({fc2.dtype}) must have one dtype, and rows of x adjacent elements."
        )
    if not (fc1.is_contiguous() and fc2.is_contiguous()):
        raise ValueError("expert_mlp: the weights must be contiguous: call .contiguous().")
    if routing.experts.shape != routing.weights.shape or len(routing.experts) != len(x):
        raise ValueError(
            f"expert_mlp: {len(x)} tokens, but experts {tuple(routing.experts.shape)} and weights "
            f"{tuple(routing.weights.shape)}."
        )
