"""How tokens reach experts on other ranks and what the experts say comes back.

Every rank of the expert-parallel group gets the tokens of all, computes its own experts for them,
and the sums are reduced to who brought the tokens. This sends more than an all-to-all would, but
nobody's sizes depend on the routing: the host learns nothing, and a graph can hold it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.ops.expert_routing import Routing

ROW_ALIGNMENT = 32
"""Bytes that the row of a token is padded to, so that kernels read it in whole words."""


class TokenDispatcher:
    """Gathers tokens over the ranks of a group and reduces sums back to them.

    Args:
        group: the expert-parallel group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)

    def dispatch(self, x: Tensor, routing: Routing, tokens: int) -> tuple[Tensor, Routing]:
        """The tokens of all ranks, in the order of ranks.

        Args:
            x: `[own tokens, hidden]`, contiguous.
            routing: of these tokens.
            tokens: of each rank, padding included, the same on all; 0: as many as here.

        Returns:
            `[ranks * tokens, hidden]` and their routing; padding has no experts. Alone in the group
            the arguments.

        Raises:
            ValueError: there are more tokens here.
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
        # One collective instead of three: a row is a token, its experts and their weights, as
        # bytes.
        topk = routing.experts.size(1)
        width = x.size(1) * x.element_size()
        row = width + topk * (routing.experts.element_size() + routing.weights.element_size())
        row = -(-row // ROW_ALIGNMENT) * ROW_ALIGNMENT
        sent = torch.empty((tokens, row), dtype=torch.uint8, device=x.device)
        to_x, to_experts, to_weights = _fields(sent, x, routing)
        to_x[:own].copy_(x)
        to_experts[:own].copy_(routing.experts)
        to_weights[:own].copy_(routing.weights)
        to_experts[own:].fill_(-1)
        received = sent.new_empty((self._size * tokens, row))
        dist.all_gather_into_tensor(received, sent, group=self._group)
        all_x, experts, weights = _fields(received, x, routing)
        return all_x, Routing(experts, weights)

    def combine(self, sums: Tensor, own_tokens: int) -> Tensor:
        """Sums over all ranks' experts of this rank's tokens.

        Args:
            sums: `[ranks * tokens, hidden]` of this rank's experts, contiguous.
            own_tokens: how many were dispatched here, without padding.

        Returns:
            `[own tokens, hidden]`.
        """
        if self._size == 1:
            return sums
        own = sums.new_empty((sums.size(0) // self._size, sums.size(1)))
        dist.reduce_scatter_tensor(own, sums, group=self._group)
        return own[:own_tokens]


def _fields(rows: Tensor, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the parts of each row of bytes."""
    sizes = [x[0:1], routing.experts[0:1], routing.weights[0:1]]
    views, start = [], 0
    for like in sizes:
        end = start + like.size(1) * like.element_size()
        views.append(rows[:, start:end].view(like.dtype))
        start = end
    return views[0], views[1], views[2]
