"""A mixture-of-experts layer of an inference step, against its bytes or its products.

A layer is residual add, norm, routing, the experts' products and, where the shape has one, the
shared expert; a graph goes through several layers' weights in turn, so that they come from memory.
--path grouped takes grouped products, few the kernels for a few tokens
(`ops/experts/few_tokens.py`), whatever the rule says. With --ranks n only the first n-th of the
experts is here, as on one rank of an expert-parallel group, and rows are the tokens of all ranks.
--sweep tries other tiles than those of `ops/experts/expert_plan.py`.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernel_cases.case import (
    CACHE_BYTES,
    OURS,
    Case,
    Chain,
    Family,
    Hardware,
    Need,
    Shelf,
    Work,
    random,
)
from kernel_cases.kept_weight import MODEL, bytes_of_number, draw
from kernel_cases.linear import multiply
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
from megatron_async.ops.experts.expert_routing import Routing, route_gpu
from megatron_async.ops.experts.few_tokens import ExpertLayer, few_token_experts_gpu
from megatron_async.ops.experts.shared_gate import add_shared_expert_gpu
from megatron_async.ops.linear.quantised_weight import QuantisedWeight
from megatron_async.ops.linear.rms_norm import add_rms_norm_gpu
from megatron_async.ops.linear.stream import Stream

EPS = 1e-5


class ExpertSizes:
    """Elements and bytes of a layer's weights."""

    def __init__(self, shape: ModelArchitecture, itemsize: int, weights: str = MODEL) -> None:
        kept = bytes_of_number(weights, itemsize)
        self.gated = shape.activation == "silu"
        matrices, hidden = 3 if self.gated else 2, shape.hidden_size
        self.expert_elements = matrices * hidden * shape.moe_ffn_hidden_size
        self.expert_bytes = self.expert_elements * kept
        self.shared = shape.moe_shared_expert_intermediate_size or 0
        self.shared_elements = matrices * hidden * self.shared
        router = shape.num_moe_experts * hidden * itemsize
        self.always_bytes = self.shared_elements * kept + router

    def need(self, hit: int, pairs: int, tokens: int) -> Need:
        """What a layer needs: the weights of the experts that are hit, of the shared one and of the
        router; the experts' products (`pairs` of a token and an expert of it) and those of the
        shared one."""
        elements = pairs * self.expert_elements + tokens * self.shared_elements
        return Need(hit * self.expert_bytes + self.always_bytes, 2.0 * elements)


class Layers:
    """Random weights of several layers of one rank of those over which experts are spread."""

    def __init__(
        self, shape: ModelArchitecture, ranks: int, dtype: torch.dtype, weights: str = MODEL
    ) -> None:
        self.shape, self.weights = shape, weights
        self.local = local = shape.num_moe_experts // ranks
        self.sizes = sizes = ExpertSizes(shape, dtype.itemsize, weights)
        # A decode step of one token must not find its experts in the cache either.
        hit = min(shape.moe_router_topk, local) * sizes.expert_bytes + sizes.always_bytes
        count = max(2, min(8, int(2 * CACHE_BYTES / hit)))
        self.norm = torch.ones(shape.hidden_size, dtype=dtype, device="cuda")
        self.layers = [self._layer(local, sizes.shared, dtype) for _ in range(count)]

    def _layer(self, local: int, shared: int, dtype: torch.dtype) -> ExpertLayer:
        shape, halves = self.shape, 1 + self.sizes.gated
        hidden, ffn = shape.hidden_size, shape.moe_ffn_hidden_size

        def plain(*size: int) -> Tensor:
            return random(*size, dtype=dtype, scale=size[-1] ** -0.5)

        def kept(*size: int) -> Tensor | QuantisedWeight:
            return draw(self.weights, *size, dtype=dtype, scale=size[-1] ** -0.5)

        sigmoid = shape.moe_router_score_function == "sigmoid"
        has_bias = shape.moe_router_enable_expert_bias
        experts = shape.num_moe_experts
        return ExpertLayer(
            router=plain(experts, hidden),
            fc1=kept(local, halves * ffn, hidden),
            fc2=kept(local, hidden, ffn),
            topk=shape.moe_router_topk,
            pre_softmax=shape.moe_router_pre_softmax,
            sigmoid=sigmoid,
            bias=torch.zeros(experts, device="cuda") if has_bias else None,
            scale=shape.moe_router_topk_scaling_factor or 1.0,
            shared_fc1=kept(halves * shared, hidden) if shared else None,
            shared_fc2=kept(hidden, shared) if shared else None,
            shared_gate=plain(1, hidden) if shape.moe_shared_expert_gate else None,
        )

    def routings(self, x: Tensor) -> list[Routing]:
        """Of the same tokens in each layer."""
        return [self._routed(x, layer) for layer in self.layers]

    def routing_chain(self, x: Tensor) -> Chain:
        """The routing of each layer."""

        def run() -> None:
            self.routings(x)

        return Chain(run, len(self.layers))

    def experts_chain(self, x: Tensor, routings: list[Routing], plan: ExpertPlan) -> Chain:
        """The grouped products of each layer."""
        return Chain(partial(self._experts, x, routings, plan), len(self.layers))

    def grouped_chain(self, x: Tensor, plan: ExpertPlan) -> Chain:
        """All of each layer, by grouped products."""
        return Chain(partial(self._grouped, x, plan), len(self.layers))

    def few_chain(self, x: Tensor, plan: FewTokenPlan) -> Chain:
        """All of each layer, by the kernels for a few tokens."""
        return Chain(partial(self._few, x, plan), len(self.layers))

    def floor_us(
        self, routings: list[Routing], tokens: int, hardware: Hardware
    ) -> tuple[float, float]:
        """Experts hit, and the least microseconds, of a layer on average."""
        hit, least = 0.0, 0.0
        for routing in routings:
            here = routing.experts[routing.experts < self.local]
            experts = here.unique().numel()
            need = self.sizes.need(experts, here.numel(), tokens)
            hit += experts / len(routings)
            least += hardware.floor_us(need) / len(routings)
        return hit, least

    def _routed(self, x: Tensor, layer: ExpertLayer) -> Routing:
        rule = layer.pre_softmax, None, 0, layer.sigmoid, layer.bias, layer.scale
        return route_gpu(x, layer.router, layer.topk, *rule)

    def _experts(self, x: Tensor, routings: list[Routing], plan: ExpertPlan) -> None:
        for routing, layer in zip(routings, self.layers, strict=True):
            expert_mlp_by_plan(x, routing, layer.fc1, layer.fc2, 0, plan)

    def _grouped(self, x: Tensor, plan: ExpertPlan) -> None:
        output, residual = x, torch.zeros_like(x)
        for layer in self.layers:
            normed, residual = add_rms_norm_gpu(output, residual, self.norm, EPS)
            routing = self._routed(normed, layer)
            output = expert_mlp_by_plan(normed, routing, layer.fc1, layer.fc2, 0, plan)
            if layer.shared_fc1 is None or layer.shared_fc2 is None:
                continue
            activated = multiply(
                normed, layer.shared_fc1, "swiglu" if self.sizes.gated else "squared_relu"
            )
            shared = multiply(activated, layer.shared_fc2)
            if layer.shared_gate is None:
                output = output + shared
            else:
                output = add_shared_expert_gpu(output, shared, normed, layer.shared_gate)

    def _few(self, x: Tensor, plan: FewTokenPlan) -> None:
        output, residual = x, torch.zeros_like(x)
        for layer in self.layers:
            given = Stream(output, residual, self.norm, EPS)
            output, _routing = few_token_experts_gpu(given, layer, plan)
            assert given.total is not None
            residual = given.total


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
        fc1 = layers.layers[0].fc1
        form = fc1.form if isinstance(fc1, QuantisedWeight) else None
        plan = plan_experts(pairs, experts, x.element_size(), gated, form)
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
        make = partial(Layers, DUMMY_SHAPES[name], args.ranks, torch.bfloat16, args.weights)
        return prepare(shelf.take(name, make), tokens, path, args.sweep, hardware)

    for name, tokens, path in itertools.product(shapes, args.rows or TOKENS, args.path):
        if path == "grouped" or (tokens <= MOST_FEW_TOKENS and args.ranks == 1):
            keys = {"shape": name, "tokens": tokens, "ranks": args.ranks, "path": path}
            if args.weights != MODEL:
                keys["weights"] = args.weights
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
