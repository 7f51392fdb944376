"""The experts of one rank: two stacked weights, in checkpoints under Megatron's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_async.models.layer_ops import LayerOps
from megatron_async.ops.experts.expert_routing import Routing


class StackedLinear(nn.Module):
    """One weight for all experts of this rank.

    Attributes:
        weight: `[local experts, out, in]`.
    """

    def __init__(self, experts: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((experts, rows, columns), dtype=dtype))


class Experts(MegatronModule):
    """MLPs with SwiGLU (Shazeer 2020) or, without a gate, squared ReLU, computed as grouped matrix
    products.

    Args:
        config: of the model.
        pg_collection: process groups: experts are spread over `ep`, each split over `tp`, evenly
            (`check_partition`).

    Attributes:
        first_expert: number of the first expert of this rank.
        linear_fc1: `[local experts, 2 * ffn, hidden]`, [gate; up]; without a gate `ffn` rows.
        linear_fc2: `[local experts, hidden, ffn]`.
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
        self.linear_fc1 = StackedLinear(experts, self.halves * ffn, hidden, dtype)
        self.linear_fc2 = StackedLinear(experts, hidden, ffn, dtype)

    def forward(self, hidden_states: Tensor, routing: Routing) -> Tensor:
        """Sum of this rank's experts for each token: `[tokens, hidden]` -> the same."""
        return self.ops.expert_mlp(
            hidden_states,
            routing,
            self.linear_fc1.weight,
            self.linear_fc2.weight,
            self.first_expert,
            self.config.num_moe_experts,
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

        fc1, fc2 = "linear_fc1.weight", "linear_fc2.weight"
        return {
            prefix + fc1: ShardedTensorFactory(
                f"{prefix}experts.{fc1}",
                self.linear_fc1.weight,
                gate_and_up,
                lambda halves: torch.cat(halves, dim=1),
                replica,
            ),
            prefix + fc2: part(f"{prefix}experts.{fc2}", self.linear_fc2.weight, 2, tp),
        }


def _place(group: dist.ProcessGroup) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)
