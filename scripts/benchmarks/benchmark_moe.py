"""Time a mixture-of-experts layer of an inference step beside what its bytes or products need.

A layer is routing and the experts' grouped products; a captured graph goes through several layers'
weights in turn, so that they come from memory. The floor is the larger of two times: the weights of
the experts that are hit over the bandwidth, and the products over the matrix units' speed. With
--ranks n only the first n-th of the experts is here, as on one rank of an expert-parallel group,
and tokens are those of all ranks. --sweep tries other tiles than those of
`ops/experts/expert_plan.py`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from benchmark_linear import BANDWIDTH, CACHE_BYTES, microseconds, random
from torch import Tensor

from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.experts.expert_mlp import expert_mlp_by_plan
from megatron_async.ops.experts.expert_plan import BY_HEIGHT, ExpertPlan, ProductPlan, plan_experts
from megatron_async.ops.experts.expert_routing import Routing, route
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
        # A decode step of one token must not find its experts in the cache either.
        hit = min(shape.moe_router_topk, local) * self.expert_bytes
        count = max(2, min(8, int(2 * CACHE_BYTES / hit)))
        self.routers = [
            random(shape.num_moe_experts, hidden, dtype=dtype, scale=hidden**-0.5)
            for _ in range(count)
        ]
        self.fc1 = [
            random(local, (1 + self.gated) * ffn, hidden, dtype=dtype, scale=hidden**-0.5)
            for _ in range(count)
        ]
        self.fc2 = [random(local, hidden, ffn, dtype=dtype, scale=ffn**-0.5) for _ in range(count)]

    def routings(self, x: Tensor) -> list[Routing]:
        """Of the same tokens in each layer."""
        topk, pre_softmax = self.shape.moe_router_topk, self.shape.moe_router_pre_softmax
        return [route(x, router, topk, pre_softmax) for router in self.routers]

    def route(self, x: Tensor) -> None:
        """`routings`, to be timed."""
        self.routings(x)

    def experts(self, x: Tensor, routings: list[Routing], plan: ExpertPlan) -> None:
        """The grouped products of each layer."""
        for routing, fc1, fc2 in zip(routings, self.fc1, self.fc2, strict=True):
            expert_mlp_by_plan(x, routing, fc1, fc2, 0, plan)

    def whole(self, x: Tensor, plan: ExpertPlan) -> None:
        """Both, layer by layer."""
        for router, fc1, fc2 in zip(self.routers, self.fc1, self.fc2, strict=True):
            routing = route(
                x, router, self.shape.moe_router_topk, self.shape.moe_router_pre_softmax
            )
            expert_mlp_by_plan(x, routing, fc1, fc2, 0, plan)

    def floor(self, routings: list[Routing]) -> tuple[float, float]:
        """Experts hit, and the least microseconds, of a layer on average."""
        hit, least = 0.0, 0.0
        for routing in routings:
            here = routing.experts[routing.experts < self.local]
            experts = here.unique().numel()
            weights = experts * self.expert_bytes / BANDWIDTH
            products = 2 * here.numel() * self.expert_elements / FLOPS
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


def sweep(layers: Layers, x: Tensor, height: int, replays: int) -> None:
    """Print the five best plans of `candidates`."""
    routings = layers.routings(x)
    found: list[tuple[float, ExpertPlan]] = []
    for candidate in candidates(height):
        call: Callable[[], None] = partial(layers.experts, x, routings, candidate)
        try:
            found.append((microseconds(call, replays) / len(layers.fc1), candidate))
        except Exception as error:  # too many registers or too much shared memory
            print(f"  {candidate}: {type(error).__name__}")
    for time, candidate in sorted(found, key=lambda pair: pair[0])[:5]:
        print(f"  {time:9.2f} us  {candidate}", flush=True)


def main() -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=MOE_SHAPES, default=["qwen3-30b-a3b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 8192])
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "benchmark_moe: needs a CUDA device, and torch finds none.\n")
    print(
        f"{'shape':<15}{'tokens':>7}{'hit':>7}{'floor us':>10}{'layer':>10}{'routing':>9}"
        f"{'experts':>10}"
    )
    figures = []
    for name in args.shapes:
        layers = Layers(DUMMY_SHAPES[name], args.ranks, torch.bfloat16)
        count = len(layers.fc1)
        for tokens in args.tokens:
            x = random(tokens, layers.shape.hidden_size, dtype=torch.bfloat16)
            routings = layers.routings(x)
            pairs = tokens * layers.shape.moe_router_topk
            spread_over, itemsize = layers.shape.num_moe_experts, x.element_size()
            plan = plan_experts(pairs, spread_over, itemsize, layers.gated)
            hit, floor = layers.floor(routings)
            calls: list[Callable[[], None]] = [
                partial(layers.whole, x, plan),
                partial(layers.route, x),
                partial(layers.experts, x, routings, plan),
            ]
            times = [microseconds(call, args.replays) / count for call in calls]
            layer, routing, experts = times
            print(
                f"{name:<15}{tokens:>7}{hit:>7.1f}{floor:>10.2f}{layer:>10.2f}{routing:>9.2f}"
                f"{experts:>10.2f}",
                flush=True,
            )
            row = {"shape": name, "tokens": tokens, "ranks": args.ranks, "experts_hit": hit}
            row |= {"floor_us": floor, "layer_us": layer, "routing_us": routing}
            figures.append({**row, "experts_us": experts})
            if args.sweep:
                sweep(layers, x, plan.up.block_m, args.replays)
        del layers
    if args.json:
        write_record(args.json, "moe", vars(args), figures)


if __name__ == "__main__":
    main()
