"""A mixture-of-experts layer of an inference step, against its bytes or its products.

A layer is residual add, norm, routing, the experts' products and, where the shape has one, the
shared expert; a graph goes through several layers' weights in turn, so that they come from memory.
--path grouped takes grouped products, few the kernels for a few tokens
(`ops/experts/few_tokens.py`), whatever the rule says. With --ranks n only the first n-th of the
experts is here, as on one rank of an expert-parallel group, and rows are the tokens of all ranks.
--sweep tries other tiles than those of `ops/experts/expert_plan.py`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from kernel_cases.case import OURS, Case, Chain, Family, Shelf, Work
from kernel_cases.expert_layers import Layers
from kernel_cases.hardware import Hardware
from kernel_cases.tensors import random
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.experts.expert_plan import (
    BY_HEIGHT,
    MOST_FEW_TOKENS,
    ExpertPlan,
    FewTokenPlan,
    ProductPlan,
    plan_experts,
    plan_few_tokens,
)

TOKENS = (1, 4, 16, 64, 256, 1024, 8192)
SHARED_MEMORY = 220_000
"""Bytes of pipeline stages that one program may take."""


def candidates(height: int) -> Iterator[ExpertPlan]:
    """Plans with tiles of this height and the ones beside it that fit a processor; one product's
    differs from `BY_HEIGHT`."""
    heights = [found for found in BY_HEIGHT if height // 2 <= found <= height * 2]
    widths, depths = (16, 32, 64, 128, 256), (64, 128)
    for tall, width, depth, stages in itertools.product(heights, widths, depths, (3, 4, 5)):
        base = BY_HEIGHT[tall]
        part = ProductPlan(tall, width, depth, 8 if tall * width >= 8192 else 4, stages)
        for plan, rows in (
            (ExpertPlan(part, base.down), tall + 2 * width),
            (ExpertPlan(base.up, part), tall + width),
        ):
            if rows * depth * 2 * stages <= SHARED_MEMORY:
                yield plan


def few_candidates(base: FewTokenPlan) -> Iterator[FewTokenPlan]:
    """Layouts for a few tokens that differ from this one in one kernel."""
    for warps, rows, depth, turns in itertools.product(
        (4, 8), (1, 2), (6, 8, 11), (1, 2, 4, 6, 8, 12, 16)
    ):
        up = {"up_rows": warps * rows, "up_depth": depth, "turns": turns}
        yield replace(base, warps=warps, **up)
    for rows, warps, depth in itertools.product((1, 2, 4), (2, 4, 8), (2, 3, 4, 8)):
        yield replace(base, down_rows=rows, down_warps=warps, down_depth=depth)
    for experts in (1, 2, 4, 8):
        yield replace(base, block_experts=experts)


def prepare(layers: Layers, tokens: int, path: str, sweep: bool, hardware: Hardware) -> Work:
    """One layer's work at so many tokens, on one path."""
    x = random(tokens, layers.shape.hidden_size)
    routings = layers.routings(x)
    hit, floor = layers.floor_us(routings, tokens, hardware)
    others: Iterator[tuple[str, Chain]]
    if path == "few":
        few_plan = plan_few_tokens(tokens, layers.layers[0].shape, MOST_FEW_TOKENS)
        assert few_plan is not None, "its rows are multiples of 16 bytes"
        chains = {OURS: layers.few_chain(x, few_plan)}
        others = ((str(plan), layers.few_chain(x, plan)) for plan in few_candidates(few_plan))
    else:
        pairs = tokens * layers.shape.moe_router_topk
        experts, gated = layers.shape.num_moe_experts, layers.sizes.gated
        plan = plan_experts(pairs, experts, x.element_size(), gated)
        chains = {OURS: layers.grouped_chain(x, plan), "routing": layers.routing_chain(x)}
        chains["experts"] = layers.experts_chain(x, routings, plan)
        others = (
            (str(other), layers.experts_chain(x, routings, other))
            for other in candidates(plan.up.block_m)
        )
    figures = {"experts_hit": hit}
    return Work(chains, floor, figures, candidates=others if sweep else ())


def cases(args: argparse.Namespace, shapes: Sequence[str], hardware: Hardware) -> Iterator[Case]:
    """Each shape at each number of tokens, on each path that takes them."""
    shelf: Shelf[Layers] = Shelf()

    def put(name: str, tokens: int, path: str) -> Work:
        make = partial(Layers, DUMMY_SHAPES[name], args.ranks, torch.bfloat16)
        return prepare(shelf.take(name, make), tokens, path, args.sweep, hardware)

    for name, tokens, path in itertools.product(shapes, args.rows or TOKENS, args.path):
        if path == "grouped" or (tokens <= MOST_FEW_TOKENS and args.ranks == 1):
            keys = {"shape": name, "tokens": tokens, "ranks": args.ranks, "path": path}
            yield Case(f"{name} {tokens} {path}", keys, partial(put, name, tokens, path))


def add_options(group: argparse._ArgumentGroup) -> None:
    """Options of this family."""
    group.add_argument(
        "--path", nargs="+", choices=["grouped", "few"], default=["grouped", "few"],
        help=f"few: up to {MOST_FEW_TOKENS} tokens on one rank; more are left out",
    )  # fmt: skip
    group.add_argument("--ranks", type=int, default=1, help="ranks that share the experts")
    group.add_argument("--sweep", action="store_true", help="try other tiles")


FAMILY = Family(
    name="experts",
    about="a layer with experts; its routing and its grouped products alone",
    shapes=sorted(name for name, shape in DUMMY_SHAPES.items() if shape.num_moe_experts),
    default_shapes=["qwen3-30b-a3b"],
    parts=("routing", "experts"),
    references=(),
    add_options=add_options,
    cases=cases,
)
