"""Mixture-of-experts layers of an inference step on random weights, and what they need."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernel_cases.case import Chain
from kernel_cases.hardware import CACHE_BYTES, Hardware, Need
from kernel_cases.linear import multiply
from kernel_cases.tensors import random
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.decoder_layer import activation_of
from megatron_async.ops.experts.expert_mlp import expert_mlp_by_plan
from megatron_async.ops.experts.expert_plan import ExpertPlan, FewTokenPlan
from megatron_async.ops.experts.expert_routing import Routing, route_gpu
from megatron_async.ops.experts.few_tokens import ExpertLayer, few_token_experts_gpu
from megatron_async.ops.experts.shared_gate import add_shared_expert_gpu
from megatron_async.ops.linear.rms_norm import add_rms_norm_gpu
from megatron_async.ops.linear.stream import Stream

EPS = 1e-5


class ExpertSizes:
    """Elements and bytes of a layer's weights.

    Args:
        shape: of the whole model.
        itemsize: bytes of an element.
    """

    def __init__(self, shape: ModelArchitecture, itemsize: int) -> None:
        self.gated = shape.activation == "silu"
        matrices, hidden = 3 if self.gated else 2, shape.hidden_size
        self.expert_elements = matrices * hidden * shape.moe_ffn_hidden_size
        self.expert_bytes = self.expert_elements * itemsize
        self.shared = shape.moe_shared_expert_intermediate_size or 0
        self.shared_elements = matrices * hidden * self.shared
        always = self.shared_elements + shape.num_moe_experts * hidden
        self.always_bytes = always * itemsize

    def need(self, hit: int, pairs: int, tokens: int) -> Need:
        """What a layer needs: the weights of the experts that are hit, of the shared one and of the
        router; the experts' products and those of the shared one.

        Args:
            hit: experts that some token goes to.
            pairs: of a token and an expert of it.
            tokens: in the step.
        """
        elements = pairs * self.expert_elements + tokens * self.shared_elements
        return Need(hit * self.expert_bytes + self.always_bytes, 2.0 * elements)


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
        self.sizes = sizes = ExpertSizes(shape, dtype.itemsize)
        # A decode step of one token must not find its experts in the cache either.
        hit = min(shape.moe_router_topk, local) * sizes.expert_bytes + sizes.always_bytes
        count = max(2, min(8, int(2 * CACHE_BYTES / hit)))
        self.norm = torch.ones(shape.hidden_size, dtype=dtype, device="cuda")
        self.layers = [self._layer(local, sizes.shared, dtype) for _ in range(count)]

    def _layer(self, local: int, shared: int, dtype: torch.dtype) -> ExpertLayer:
        shape, halves = self.shape, 1 + self.sizes.gated
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
            activated = multiply(normed, layer.shared_fc1, activation_of(self.sizes.gated))
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
