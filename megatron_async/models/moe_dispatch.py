"""Send tokens to experts on other ranks, and get the experts' sums back.

Every rank of the expert-parallel group gets the tokens of all ranks and computes its own experts
for them. A reduce-scatter gives each rank the sums for its own tokens. This sends more data than an
all-to-all. But sizes do not depend on the routing, so the host need not read them, and the exchange
can be captured in a CUDA graph.

On GPUs of one host, small steps exchange through symmetric memory by the engine's own kernels
(`ops/experts/symmetric_exchange.py`); the other exchanges are NCCL's, or gloo's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.ops.experts.expert_exchange import packed_row_bytes
from megatron_async.ops.experts.expert_routing import Routing
from megatron_async.ops.experts.symmetric_exchange import SymmetricExchange, exchange_of


class TokenDispatcher:
    """Gathers tokens over the ranks of a group and reduces sums back to them.

    Args:
        group: the expert-parallel group.
        topk: experts of a token.
    """

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
        """The tokens of all ranks, in the order of ranks.

        Args:
            x: `[own tokens, hidden]`, contiguous.
            routing: of these tokens.
            tokens: of each rank, padding included, the same on all; 0: as many as here.

        Returns:
            `[ranks * tokens, hidden]` and their routing; padding has no experts. In a group of one
            rank, the arguments.

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
        symmetric = self._combines(sums)
        if symmetric is not None:
            self._exchange.calls["combine"] += 1
            return symmetric.combine(sums, own_tokens)
        self._exchange.calls["reduce-scatter"] += 1
        own = sums.new_empty((sums.size(0) // self._size, sums.size(1)))
        dist.reduce_scatter_tensor(own, sums, group=self._group)
        return own[:own_tokens]

    def combines_with_norm(self, sums: Tensor) -> bool:
        """Whether `combine_add_rms_norm` takes sums like `combine`'s; the same on all ranks."""
        return self._combines(sums) is not None

    def combine_add_rms_norm(
        self, sums: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`combine`, residual add and RMSNorm in one kernel, where `combines_with_norm`.

        Args:
            sums: as for `combine`.
            residual: `[own tokens, hidden]`.
            weight: `[hidden]`, the norm's weight.
            eps: added to the mean square.

        Returns:
            normed `[own tokens, hidden]`, and the new residual.
        """
        symmetric = self._combines(sums)
        assert symmetric is not None, "see combines_with_norm"
        self._exchange.calls["combine with norm"] += 1
        return symmetric.combine_add_rms_norm(sums, residual, weight, eps)

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
            return symmetric.gather(x, routing, tokens)
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
