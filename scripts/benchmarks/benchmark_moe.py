"""Time a mixture-of-experts layer of an inference step beside what its bytes or products need.

A layer is residual add, norm, routing, the experts' products and, where the shape has one, the
shared expert; a captured graph goes through several layers' weights in turn, so that they come from
memory. The floor is the larger of two times: the weights of the experts that are hit, of the shared
one and of the router over the bandwidth, and the products over the matrix units' speed. --path
grouped takes grouped products, few the kernels for a few tokens (`ops/experts/few_tokens.py`),
whatever the rule says. With --ranks n only the first n-th of the experts is here, as on one rank of
an expert-parallel group, and tokens are those of all ranks. --sweep tries other tiles than those of
`ops/experts/expert_plan.py`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from benchmark_linear import BANDWIDTH, CACHE_BYTES, EPS, microseconds, random
from torch import Tensor

from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.experts.expert_mlp import expert_mlp_by_plan
from megatron_async.ops.experts.expert_plan import (
    BY_HEIGHT,
    MOST_FEW_TOKENS,
    ExpertPlan,
    FewTokenPlan,
    ProductPlan,
    plan_experts,
    plan_few_tokens,
)
from megatron_async.ops.experts.expert_routing import Routing, route
from megatron_async.ops.experts.few_tokens import ExpertLayer, few_token_experts
from megatron_async.ops.experts.shared_gate import add_shared_expert
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.linear.skinny_linear import (
    Unnormed,
    linear,
    linear_squared_relu,
    linear_swiglu,
)
from megatron_async.profiling.benchmark_record import write_record

FLOPS = 8e14
"""Multiplications and additions a second of a large bfloat16 product on an H200."""
SHARED_MEMORY = 220_000
"""Bytes of pipeline stages that one program may take."""
MOE_SHAPES = sorted(name for name, shape in DUMMY_SHAPES.items() if shape.num_moe_experts)


class Layers:
    """Random weights of several layers of one rank.

    Args:
        shape: of the whole model.
        ranks: over which its experts are spread.
        dtype: of the weights.
    """

    def __init__(self, shape: ModelArchitecture, ranks: int, dtype: torch.dtype) -> None:
        self.shape = shape
        self.local = local = shape.num_moe_experts // ranks
        hidden, ffn = shape.hidden_size, shape.moe_ffn_hidden_size
        self.gated = shape.activation == "silu"
        self.expert_elements = (3 if self.gated else 2) * hidden * ffn
        self.expert_bytes = self.expert_elements * dtype.itemsize
        shared = shape.moe_shared_expert_intermediate_size or 0
        self.shared_elements = (3 if self.gated else 2) * hidden * shared
        always = self.shared_elements + shape.num_moe_experts * hidden
        self.always_bytes = always * dtype.itemsize
        # A decode step of one token must not find its experts in the cache either.
        hit = min(shape.moe_router_topk, local) * self.expert_bytes + self.always_bytes
        count = max(2, min(8, int(2 * CACHE_BYTES / hit)))
        self.norm = torch.ones(hidden, dtype=dtype, device="cuda")
        self.layers = [self._layer(local, shared, dtype) for _ in range(count)]

    def _layer(self, local: int, shared: int, dtype: torch.dtype) -> ExpertLayer:
        shape, halves = self.shape, 1 + self.gated
        hidden, ffn = shape.hidden_size, shape.moe_ffn_hidden_size

        def draw(*size: int) -> Tensor:
            return random(*size, dtype=dtype, scale=size[-1] ** -0.5)

        sigmoid = shape.moe_router_score_function == "sigmoid"
        has_bias = shape.moe_router_enable_expert_bias
        experts = shape.num_moe_experts
        return ExpertLayer(
            router=draw(experts, hidden),
            fc1=draw(local, halves * ffn, hidden),
            fc2=draw(local, hidden, ffn),
            topk=shape.moe_router_topk,
            pre_softmax=shape.moe_router_pre_softmax,
            sigmoid=sigmoid,
            bias=torch.zeros(experts, device="cuda") if has_bias else None,
            scale=shape.moe_router_topk_scaling_factor or 1.0,
            shared_fc1=draw(halves * shared, hidden) if shared else None,
            shared_fc2=draw(hidden, shared) if shared else None,
            shared_gate=draw(1, hidden) if shape.moe_shared_expert_gate else None,
        )

    def routings(self, x: Tensor) -> list[Routing]:
        """Of the same tokens in each layer."""
        return [self._routed(x, layer) for layer in self.layers]

    def _routed(self, x: Tensor, layer: ExpertLayer) -> Routing:
        rule = layer.pre_softmax, None, 0, layer.sigmoid, layer.bias, layer.scale
        return route(x, layer.router, layer.topk, *rule)

    def route(self, x: Tensor) -> None:
        """`routings`, to be timed."""
        self.routings(x)

    def experts(self, x: Tensor, routings: list[Routing], plan: ExpertPlan) -> None:
        """The grouped products of each layer."""
        for routing, layer in zip(routings, self.layers, strict=True):
            expert_mlp_by_plan(x, routing, layer.fc1, layer.fc2, 0, plan)

    def grouped(self, x: Tensor, plan: ExpertPlan) -> None:
        """All of it, layer by layer, by grouped products."""
        output, residual = x, torch.zeros_like(x)
        for layer in self.layers:
            normed, residual = add_rms_norm(output, residual, self.norm, EPS)
            routing = self._routed(normed, layer)
            output = expert_mlp_by_plan(normed, routing, layer.fc1, layer.fc2, 0, plan)
            if layer.shared_fc1 is None or layer.shared_fc2 is None:
                continue
            first = linear_swiglu if self.gated else linear_squared_relu
            shared = linear(first(normed, layer.shared_fc1), layer.shared_fc2)
            if layer.shared_gate is None:
                output = output + shared
            else:
                output = add_shared_expert(output, shared, normed, layer.shared_gate)

    def few(self, x: Tensor, plan: FewTokenPlan) -> None:
        """Norm, experts and shared expert of each layer by the kernels for a few tokens."""
        output, residual = x, torch.zeros_like(x)
        for layer in self.layers:
            given = Unnormed(output, residual, self.norm, EPS)
            output, _routing = few_token_experts(given, layer, plan)
            assert given.total is not None
            residual = given.total

    def floor(self, routings: list[Routing], tokens: int) -> tuple[float, float]:
        """Experts hit, and the least microseconds, of a layer on average."""
        hit, least = 0.0, 0.0
        for routing in routings:
            here = routing.experts[routing.experts < self.local]
            experts = here.unique().numel()
            weights = (experts * self.expert_bytes + self.always_bytes) / BANDWIDTH
            elements = here.numel() * self.expert_elements + tokens * self.shared_elements
            products = 2 * elements / FLOPS
            hit += experts / len(routings)
            least += max(weights, products) * 1e6 / len(routings)
        return hit, least


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
    for rows, depth, group in itertools.product((4, 8, 16), (3, 4, 6, 8), (1, 2, 4)):
        yield replace(base, down_rows=rows, down_depth=depth, group=group)
    for experts in (1, 2, 4, 8):
        yield replace(base, block_experts=experts)


def sweep(calls: Iterator[tuple[str, Callable[[], None]]], links: int, replays: int) -> None:
    """Print the five best of some named calls, microseconds a layer."""
    found: list[tuple[float, str]] = []
    for name, call in calls:
        try:
            found.append((microseconds(call, replays) / links, name))
        except Exception as error:  # too many registers or too much shared memory
            print(f"  {name}: {type(error).__name__}")
    for time, name in sorted(found)[:5]:
        print(f"  {time:9.2f} us  {name}", flush=True)


def measure(layers: Layers, name: str, tokens: int, path: str, args: argparse.Namespace) -> dict:
    """Print a line, and return its figures."""
    shape, count = layers.shape, len(layers.layers)
    x = random(tokens, shape.hidden_size, dtype=torch.bfloat16)
    routings = layers.routings(x)
    hit, floor = layers.floor(routings, tokens)
    row = {"shape": name, "tokens": tokens, "ranks": args.ranks, "path": path}
    row |= {"experts_hit": hit, "floor_us": floor}
    calls: dict[str, Callable[[], None]]
    others: Iterator[tuple[str, Callable[[], None]]]
    if path == "few":
        few_plan = plan_few_tokens(tokens, layers.layers[0].shape, MOST_FEW_TOKENS)
        assert few_plan is not None, "its rows are multiples of 16 bytes"
        calls = {"layer": partial(layers.few, x, few_plan)}
        others = ((str(plan), partial(layers.few, x, plan)) for plan in few_candidates(few_plan))
    else:
        pairs, itemsize = tokens * shape.moe_router_topk, x.element_size()
        plan = plan_experts(pairs, shape.num_moe_experts, itemsize, layers.gated)
        calls = {"layer": partial(layers.grouped, x, plan), "routing": partial(layers.route, x)}
        calls["experts"] = partial(layers.experts, x, routings, plan)
        others = (
            (str(plan), partial(layers.experts, x, routings, plan))
            for plan in candidates(plan.up.block_m)
        )
    times = {key: microseconds(call, args.replays) / count for key, call in calls.items()}
    cells = "".join(f"{time:>10.2f}" for time in times.values())
    line = f"{name:<20}{tokens:>7} {path:<8}{hit:>6.1f}{floor:>10.2f}{cells}"
    print(line, flush=True)
    if args.sweep:
        sweep(others, count, args.replays)
    return row | {f"{key}_us": time for key, time in times.items()}


def main() -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=MOE_SHAPES, default=["qwen3-30b-a3b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 8192])
    parser.add_argument(
        "--path", nargs="+", choices=["grouped", "few"], default=["grouped", "few"],
        help=f"few: up to {MOST_FEW_TOKENS} tokens on one rank; more are left out",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "benchmark_moe: needs a CUDA device, and torch finds none.\n")
    print(
        f"{'shape':<20}{'tokens':>7} {'path':<8}{'hit':>6}{'floor us':>10}{'layer':>10}"
        f"{'routing':>10}{'experts':>10}"
    )
    figures = []
    for name in args.shapes:
        layers = Layers(DUMMY_SHAPES[name], args.ranks, torch.bfloat16)
        for tokens, path in itertools.product(args.tokens, args.path):
            if path == "grouped" or (tokens <= MOST_FEW_TOKENS and args.ranks == 1):
                figures.append(measure(layers, name, tokens, path, args))
        del layers
    if args.json:
        write_record(args.json, "moe", vars(args), figures)


if __name__ == "__main__":
    main()
