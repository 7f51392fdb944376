"""The experts of one rank: two stacked weights, in checkpoints under Megatron's names; and
how tokens go to experts on other ranks, and the experts' sums come back.

Every rank of the expert-parallel group gets the tokens of all ranks and computes its own experts
for them. A reduce-scatter gives each rank the sums for its own tokens. This sends more data than an
all-to-all. But sizes do not depend on the routing, so the host need not read them, and the exchange
can be captured in a CUDA graph.

On GPUs of one host, small steps exchange through symmetric memory by the engine's own kernels
(`ops/experts/expert_exchange.py`); the other exchanges are NCCL's, or gloo's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_async.models.held_weight import HeldWeight
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.mlp import gating_of
from megatron_async.ops.experts.expert_exchange import (
    SymmetricExchange,
    combine_add_rms_norm,
    combine_in_slices,
    combine_sums,
    exchange_of,
    gather_tokens,
    packed_row_bytes,
)
from megatron_async.ops.experts.expert_mlp import ExpertWeight
from megatron_async.ops.experts.expert_routing import Routing
from megatron_async.ops.linear.activations import SWIGLU
from megatron_async.ops.linear.cpu.grouped_weight import GroupedExperts, GroupedWeight


class StackedLinear(nn.Module, HeldWeight):
    """One weight for all experts of this rank, `[local experts, out, in]`, and their biases,
    `[local experts, out]`, or None.

    Attributes:
        packed_weight: all that there is of a weight that is kept as a GGUF file's blocks.
    """

    packed_weight: GroupedWeight | None = None

    bias: nn.Parameter | None

    def __init__(
        self, experts: int, rows: int, columns: int, dtype: torch.dtype, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((experts, rows, columns), dtype=dtype))
        bias = nn.Parameter(torch.empty((experts, rows), dtype=dtype)) if has_bias else None
        self.register_parameter("bias", bias)

    @property
    def kept(self) -> ExpertWeight:
        """The weight, as `expert_mlp` takes it."""
        if self.packed_weight is None:
            return self.operand
        return GroupedExperts(self.packed_weight, len(self.weight))


class Experts(MegatronModule):
    """MLPs with a gated unit (Shazeer 2020) or, without a gate, squared ReLU, computed as grouped
    matrix products. Experts are spread over the group `ep`, each split over `tp`, evenly
    (`check_partition`).

    Attributes:
        first_expert: number of the first expert of this rank.
        linear_fc1: `[local experts, 2 * ffn, hidden]`, [gate; up]; without a gate `ffn` rows.
        linear_fc2: `[local experts, hidden, ffn]`.
        gating: the unit; None: squared ReLU.
    """

    ops = LayerOps()

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.tp
        self.replicas = pg_collection.expt_dp
        experts = config.num_moe_experts // self.ep_group.size()
        ffn = config.moe_ffn_hidden_size // self.tp_group.size()
        self.first_expert = dist.get_rank(self.ep_group) * experts
        hidden, dtype = config.hidden_size, config.params_dtype
        self.halves = 2 if config.gated_linear_unit else 1
        self.gating, has_bias = gating_of(config), config.add_bias_linear
        self.linear_fc1 = StackedLinear(experts, self.halves * ffn, hidden, dtype, has_bias)
        self.linear_fc2 = StackedLinear(experts, hidden, ffn, dtype, has_bias)

    @property
    def bias2(self) -> Tensor | None:
        """The bias of the second product, which every tensor-parallel rank holds, on that rank
        which adds it to the sum over the ranks."""
        return self.linear_fc2.bias if dist.get_rank(self.tp_group) == 0 else None

    def forward(self, hidden_states: Tensor, routing: Routing) -> Tensor:
        """Sum of this rank's experts for each token: `[tokens, hidden]` -> the same."""
        return self.ops.expert_mlp(
            hidden_states,
            routing,
            self.linear_fc1.kept,
            self.linear_fc2.kept,
            self.first_expert,
            self.config.num_moe_experts,
            self.linear_fc1.bias,
            self.bias2,
            self.gating or SWIGLU,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Megatron's form: under `experts.linear_fc1.weight` and `experts.linear_fc2.weight` one
        global tensor, its first dimension the experts."""
        lead = len(sharded_offsets)
        ep, tp = (_place(group) for group in (self.ep_group, self.tp_group))
        replica = (0, 0, dist.get_rank(self.replicas))

        def part(key: str, data: Tensor, axis: int, place: tuple[int, int]) -> ShardedTensor:
            offsets = (*sharded_offsets, (lead, *ep), (lead + axis, *place))
            return ShardedTensor.from_rank_offsets(
                key, data, *offsets, replica_id=replica, prepend_axis_num=lead
            )

        def gate_and_up(key: str, data: Tensor, *_: Any) -> list[ShardedTensor]:
            # Each rank holds its share of the gates, if there are any, and under it of the ups.
            index, size = tp
            halves = data.chunk(self.halves, 1)
            places = [(index + half * size, self.halves * size) for half in range(self.halves)]
            return [part(key, half, 1, place) for half, place in zip(halves, places, strict=True)]

        found: dict[str, Any] = {}
        for name, tensor in self.linear_fc1.named_parameters(prefix="linear_fc1"):
            found[prefix + name] = ShardedTensorFactory(
                f"{prefix}experts.{name}",
                tensor,
                gate_and_up,
                lambda halves: torch.cat(halves, dim=1),
                replica,
            )
        fc2 = "linear_fc2.weight"
        found[prefix + fc2] = part(f"{prefix}experts.{fc2}", self.linear_fc2.weight, 2, tp)
        if (bias := self.linear_fc2.bias) is not None:
            key, whole = f"{prefix}experts.linear_fc2.bias", (*sharded_offsets, (lead, *ep))
            same = (0, tp[0], dist.get_rank(self.replicas))
            found[f"{prefix}linear_fc2.bias"] = ShardedTensor.from_rank_offsets(
                key, bias, *whole, replica_id=same, prepend_axis_num=lead
            )
        return found


def _place(group: dist.ProcessGroup) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


class TokenDispatcher:
    """Gathers tokens over the ranks of an expert-parallel group and reduces sums back to them."""

    def __init__(self, group: dist.ProcessGroup, topk: int) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._topk = topk
        self._exchange = exchange_of(group)

    @property
    def is_alone(self) -> bool:
        """Whether all experts are on this rank."""
        return self._size == 1

    def dispatch(self, x: Tensor, routing: Routing, tokens: int) -> tuple[Tensor, Routing]:
        """The tokens of all ranks, in the order of ranks, and their routing; in a group of one
        rank, the arguments.

        Args:
            x: `[own tokens, hidden]`, contiguous.
            routing: of these tokens; padding has no experts.
            tokens: of each rank, padding included, the same on all; 0: as many as here.

        Raises:
            ValueError: this rank has more than `tokens` tokens.
        """
        if self._size == 1:
            return x, routing
        own = x.size(0)
        tokens = tokens or own
        if own > tokens:
            raise ValueError(
                f"dispatch_tokens={tokens}, but this rank has {own} tokens: the ranks of an "
                "expert-parallel group must agree on the largest number."
            )
        received = self._gather(x, routing, tokens)
        all_x, experts, weights = _fields(received, x, routing)
        return all_x, Routing(experts, weights)

    def combine(self, sums: Tensor, own_tokens: int, in_order: bool = False) -> Tensor:
        """Sums over all ranks' experts of this rank's own tokens, without padding, of `[ranks *
        tokens, hidden]` of this rank's experts, contiguous. `in_order`: each token is added in one
        order, whatever the tokens (`ExpertExchange.check_order`)."""
        if self._size == 1:
            return sums
        symmetric = self._combines(sums)
        if symmetric is None and in_order and self._size > 2:
            self._exchange.calls["combine in slices"] += 1
            meeting = self._exchange.symmetric[sums.size(1), self._topk, sums.dtype].combines
            return combine_in_slices(sums, own_tokens, meeting)
        if symmetric is not None:
            self._exchange.calls["combine"] += 1
            return combine_sums(sums, own_tokens, symmetric.combines)
        self._exchange.calls["reduce-scatter"] += 1
        own = sums.new_empty((sums.size(0) // self._size, sums.size(1)))
        dist.reduce_scatter_tensor(own, sums, group=self._group)
        return own[:own_tokens]

    def combines_with_norm(self, sums: Tensor, in_order: bool = False) -> bool:
        """Whether `combine_add_rms_norm` takes sums like `combine`'s; the same on all ranks."""
        # Over more ranks its norm has other warps than the norm's own kernel.
        return self._combines(sums) is not None and not (in_order and self._size > 2)

    def combine_add_rms_norm(
        self, sums: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`combine`, residual add and RMSNorm in one kernel, where `combines_with_norm`: normed
        `[own tokens, hidden]`, and the new residual."""
        symmetric = self._combines(sums)
        assert symmetric is not None, "see combines_with_norm"
        self._exchange.calls["combine with norm"] += 1
        return combine_add_rms_norm(sums, residual, weight, eps, symmetric.combines)

    def _combines(self, sums: Tensor) -> SymmetricExchange | None:
        tokens, hidden = sums.size(0) // self._size, sums.size(1)
        return self._exchange.find(tokens, hidden, self._topk, sums.dtype)

    def _gather(self, x: Tensor, routing: Routing, tokens: int) -> Tensor:
        """Rows of bytes of all ranks: one collective instead of three. A row is a token, its
        experts and their weights."""
        own, hidden = x.shape
        symmetric = self._exchange.find(tokens, hidden, self._topk, x.dtype)
        if symmetric is not None:
            self._exchange.calls["gather"] += 1
            return gather_tokens(x, routing, tokens, symmetric.gathers)
        self._exchange.calls["all-gather"] += 1
        row = packed_row_bytes(hidden, self._topk, x.dtype)
        sent = torch.empty((tokens, row), dtype=torch.uint8, device=x.device)
        to_x, to_experts, to_weights = _fields(sent, x, routing)
        to_x[:own].copy_(x)
        to_experts[:own].copy_(routing.experts)
        to_weights[:own].copy_(routing.weights)
        to_experts[own:].fill_(-1)
        received = sent.new_empty((self._size * tokens, row))
        dist.all_gather_into_tensor(received, sent, group=self._group)
        return received


def _fields(rows: Tensor, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the parts of each row of bytes."""
    sizes = [x[0:1], routing.experts[0:1], routing.weights[0:1]]
    views, start = [], 0
    for like in sizes:
        end = start + like.size(1) * like.element_size()
        views.append(rows[:, start:end].view(like.dtype))
        start = end
    return views[0], views[1], views[2]
