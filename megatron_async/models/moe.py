"""A mixture-of-experts layer for inference: Megatron's weights, experts stacked in one tensor.

Megatron's own modules need a GPU in several places (`TopKRouter.gating` moves weights there, its
dispatchers make CUDA streams), and the host reads the sizes of their exchanges. Here all shapes
follow from the number of tokens, so that a step with experts is captured like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.mlp import SharedExpertMLP
from megatron_async.models.moe_experts import Experts, TokenDispatcher
from megatron_async.models.norm import normalise
from megatron_async.ops.experts.expert_plan import (
    FEW_CHAINS,
    FEW_TOKENS,
    ChainPlan,
    FewTokenPlan,
)
from megatron_async.ops.experts.expert_routing import Routing, force_routing
from megatron_async.ops.experts.few_tokens import ExpertLayer, find_plan
from megatron_async.ops.linear.activations import SWIGLU
from megatron_async.ops.linear.product_kernel import NORM_WIDTH
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.ranks.tensor_collectives import collectives_of

if TYPE_CHECKING:
    from megatron_async.models.step_view import StepView


class TopKRouter(MegatronModule):
    """Chooses each token's experts by the scores of a linear layer, in float32: their softmax, or
    the sigmoid of each.

    Attributes:
        weight: `[experts, hidden]`; every rank has all of it.
        bias: `[experts]`, the linear layer's own; or None.
        expert_bias: float32 `[experts]`, added to the scores for the choice alone; or None.
    """

    ops = LayerOps()
    float32_parameters = ("expert_bias",)

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        experts = config.num_moe_experts
        shape = (experts, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.topk: int = config.moe_router_topk
        self.pre_softmax: bool = config.moe_router_pre_softmax
        self.sigmoid = config.moe_router_score_function == "sigmoid"
        self.scale: float = config.moe_router_topk_scaling_factor or 1.0
        bias = None
        if config.moe_router_enable_expert_bias:
            bias = torch.nn.Parameter(torch.empty(experts, dtype=torch.float32))
        self.register_parameter("expert_bias", bias)
        bias = None
        if config.add_bias_linear:
            bias = torch.nn.Parameter(torch.empty(experts, dtype=config.params_dtype))
        self.register_parameter("bias", bias)
        if not 0 < self.topk <= experts:
            raise ConfigurationError(
                f"moe_router_topk={self.topk} must be between 1 and num_moe_experts={experts}."
            )

    def forward(self, hidden_states: Tensor, view: StepView | None) -> Routing:
        """Experts of `[tokens, hidden]`; tokens that belong to no request of `view` get none."""
        places, dummy_place = real_tokens(view)
        routing = self.ops.route(
            hidden_states,
            self.weight,
            self.topk,
            self.pre_softmax,
            places,
            dummy_place,
            self.sigmoid,
            self.expert_bias,
            self.scale,
            self.bias,
        )
        if (forced := forced_experts(view)) is None:
            return routing
        scores = self.pre_softmax, self.sigmoid, self.scale, self.bias
        return force_routing(routing, forced, hidden_states, self.weight, *scores)


def real_tokens(view: StepView | None) -> tuple[Tensor | None, int]:
    """Arguments of `route` that mark real tokens: their places, and the place of all others."""
    return (None, 0) if view is None else (view.step.write_index, view.dummy_place)


def forced_experts(view: StepView | None) -> Tensor | None:
    """Experts that the tokens have to go to in the layer that runs next, as `force_routing` takes
    them; None: the router chooses."""
    return None if view is None or view.routing is None else view.routing.forced


class MoELayer(MegatronModule):
    """Router, experts, the exchanges between ranks, and a shared expert if the model has one.

    Each rank of the expert-parallel group has its own tokens and its share of the experts: rank r
    of n ranks has the r-th n-th. Ranks of a tensor-parallel group have the same tokens and experts,
    and a share of each expert's inner dimension.

    If there are few tokens and all experts are on this rank, one op does routing, experts, the
    shared expert and the norm before them (`ops/experts/few_tokens.py`).

    `StepView.routing`, if there is one, gets the routing of this rank's tokens after the kernels
    that write it have been launched.
    """

    ops = LayerOps()

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection, **_: Any
    ) -> None:
        super().__init__(config)
        self.router = TopKRouter(config)
        self.experts = Experts(config, pg_collection)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = SharedExpertMLP(config, pg_collection.tp)
        self.dispatcher = TokenDispatcher(pg_collection.ep, config.moe_router_topk)
        self.tp_group = pg_collection.tp

    def forward(
        self, hidden_states: Tensor, inference_context: StepView | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """`[tokens, 1, hidden]` -> the same shape, and no bias, as in Megatron."""
        stream = Stream(hidden_states.flatten(0, 1))
        return self.run(stream, inference_context, False).value[:, None], None

    def run(self, stream: Stream, view: StepView | None, may_split: bool) -> Stream:
        """The stream behind this layer; the norm before it is done here, if one is left.

        With sequence parallelism the tokens are this rank's share of the group's, before and after.
        """
        collectives, scatter = collectives_of(self.tp_group), self._is_scattered
        has_plan = not scatter and forced_experts(view) is None
        planned = self._planned(stream.rows) if has_plan else None
        if planned is None or stream.parts_of_ranks is not None:
            normalise(self.ops, stream)
        x = stream.value
        if scatter:
            x = collectives.all_gather(x)
            planned = self._planned(x) if forced_experts(view) is None else None
        if planned is not None:
            given = x if stream.weight is None else stream
            total = stream.early_total if collectives.size == 1 else None
            added = total if total is not None and total.size(1) <= NORM_WIDTH else None
            output = self._few_tokens(given, planned, view, added)
            residual = None if added is not None else stream.total
        else:
            residual = stream.total
            dispatched = self._dispatched(x, view, may_split)
            if isinstance(dispatched, Stream):
                dispatched.residual = residual
                return dispatched
            output = dispatched
        if scatter:
            return Stream(collectives.reduce_scatter(output), residual)
        summand = output[:, None]
        if may_split and collectives.size > 1 and collectives.adds_with_norm(summand):
            add = collectives.all_reduce_add_rms_norm
            return Stream(summand, residual, parts_of_ranks=add)
        whole = collectives.all_reduce(summand, in_order=self.ops.is_invariant)
        return Stream(whole.squeeze(1), residual)

    @property
    def _is_scattered(self) -> bool:
        return collectives_of(self.tp_group).size > 1 and bool(self.config.sequence_parallel)

    def _planned(self, rows: Tensor) -> tuple[ExpertLayer, FewTokenPlan | ChainPlan] | None:
        """Weights and plan for the op of a few tokens, of `[..., tokens, hidden]`; None: it is not
        for these, or experts are elsewhere, or the shared one has biases."""
        most = FEW_CHAINS if self.ops.is_invariant else FEW_TOKENS
        if rows.size(-2) > most or not self.dispatcher.is_alone:
            return None
        router, shared = self.router, self.shared_experts
        fc1 = fc2 = gate = None
        if shared is not None:
            if shared.linear_fc1.bias is not None or shared.linear_fc2.bias is not None:
                return None
            fc1, fc2 = shared.linear_fc1.operand, shared.linear_fc2.operand
            gate = shared.gate_weight
        layer = ExpertLayer(
            router=router.weight,
            fc1=self.experts.linear_fc1.operand,
            fc2=self.experts.linear_fc2.operand,
            topk=router.topk,
            pre_softmax=router.pre_softmax,
            sigmoid=router.sigmoid,
            bias=router.expert_bias,
            scale=router.scale,
            shared_fc1=fc1,
            shared_fc2=fc2,
            shared_gate=gate,
            logit_bias=router.bias,
            bias1=self.experts.linear_fc1.bias,
            bias2=self.experts.bias2,
            gating=self.experts.gating or SWIGLU,
        )
        plan = find_plan(rows, layer, self.ops.major, self.ops.is_invariant)
        return None if plan is None else (layer, plan)

    def _few_tokens(
        self,
        x: Tensor | Stream,
        planned: tuple[ExpertLayer, FewTokenPlan | ChainPlan],
        view: StepView | None,
        added: Tensor | None,
    ) -> Tensor:
        """The output of this rank's experts, `[tokens, hidden]`, by the op for few tokens, added to
        `added`."""
        output, routing = self.ops.few_token_experts(x, *planned, *real_tokens(view), added)
        if view is not None and view.routing is not None:
            view.routing.note(routing)
        return output

    def _dispatched(self, x: Tensor, view: StepView | None, may_split: bool) -> Tensor | Stream:
        """The output of this rank's experts for `[tokens, hidden]`, by routing, dispatch and
        grouped products: the same shape, or parts for the next norm."""
        ranks = collectives_of(self.tp_group).size
        dispatched = 0 if view is None else view.dims.dispatch_tokens
        if self._is_scattered:
            dispatched = -(-dispatched // ranks) * ranks
        routing = self.router(x, view)
        if view is not None and view.routing is not None:
            view.routing.note(routing)
        gathered, routing = self.dispatcher.dispatch(x, routing, dispatched)
        sums = self.experts(gathered, routing)
        alone, in_order = ranks == 1 and self.shared_experts is None, self.ops.is_invariant
        if may_split and alone and self.dispatcher.combines_with_norm(sums, in_order):
            return Stream(sums, parts_of_ranks=self.dispatcher.combine_add_rms_norm)
        output = self.dispatcher.combine(sums, x.size(0), in_order)
        return output if self.shared_experts is None else self._add_shared(output, x)

    def _add_shared(self, output: Tensor, x: Tensor) -> Tensor:
        """`output`, `[tokens, hidden]`, plus what the shared expert makes of x, of that shape."""
        assert self.shared_experts is not None
        shared, gate = self.shared_experts(x[:, None])[0], self.shared_experts.gate_weight
        shared = shared.squeeze(1)
        if gate is None:
            return output + shared
        return self.ops.add_shared_expert(output, shared, x, gate)
