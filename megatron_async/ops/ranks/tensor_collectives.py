"""Collectives of a step among the ranks of a tensor-parallel group.

They run inside launched work, on the stream that is current there, in the order in which the model
calls them, which is the same on all ranks. On a CPU they are gloo's and block the stream's own
thread. On a GPU small sums go through symmetric memory (`ops/ranks/symmetric_all_reduce.py`), the
rest through NCCL; both are captured with the step.

Every rank gets the same bits from `all_reduce`. Gloo and NCCL add an element along one path (a
ring, or a tree) and distribute the sum. The two-shot kernel adds each element on one rank and
distributes the sum. The one-shot kernel adds in the order of ranks everywhere. Logits do not depend
on this: one rank computes each column and, if needed, the column is copied to the others.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.ops.linear.partial_sums import add_partial_sums
from megatron_async.ops.ranks.symmetric_all_reduce import SymmetricAllReduce
from megatron_async.ops.ranks.symmetric_choice import LEAST_ROWS
from megatron_async.ops.ranks.symmetric_memory import Meeting, make_meeting, make_on_all


class TensorCollectives:
    """Collectives of one group; get it by `collectives_of`.

    Args:
        group: the ranks.

    Attributes:
        size, rank: of the group, and of this process in it.
        symmetric: all-reduces through symmetric memory that `prepare` has made, by width and dtype
            of their rows. They stay, because captured steps hold their addresses.
        fallback: why there are none, or "".
        choice: the workspace that chooses tokens through symmetric memory, from `prepare_choice`,
            or None.
        calls: all-reduces and choices of tokens of eager and captured steps by kernel, as they were
            enqueued.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = group.size()
        self.rank = group.rank()
        self.symmetric: dict[tuple[int, torch.dtype], SymmetricAllReduce] = {}
        self.fallback = ""
        self.choice: Meeting | None = None
        self._no_choice = ""
        self.calls: Counter[str] = Counter()

    def prepare(self, max_rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the workspaces of the largest step, of `max_rows` tokens, before the first; all
        ranks together."""
        if self.size == 1 or device.type != "cuda":
            return
        if (hidden, dtype) in self.symmetric or self.fallback:
            return
        made, self.fallback = make_on_all(
            self._group,
            lambda: SymmetricAllReduce(self._group, max_rows, hidden, dtype, device),
        )
        if made is not None:
            self.symmetric[hidden, dtype] = made

    def prepare_choice(self, max_rows: int, device: torch.device) -> None:
        """Make the workspace for choosing the tokens of so many rows, after `prepare`; all ranks
        together."""
        if self.symmetric and self.choice is None:
            group, rows = self._group, max(max_rows, LEAST_ROWS)
            self.choice, self._no_choice = make_on_all(
                group, lambda: make_meeting(group, rows, 1, torch.int64, device)
            )

    @property
    def report(self) -> str | None:
        """Which all-reduce serves which sizes, how tokens are chosen, and why; None where there is
        no choice."""
        if self.symmetric:
            kinds = " and ".join(str(kind) for kind in self.symmetric.values())
            tokens = f"; best tokens by NCCL ({self._no_choice})" if self._no_choice else ""
            if self.choice is not None:
                tokens = f"; best tokens in one kernel up to {self.choice.places} rows"
            return f"all-reduce over {self.size} ranks: {kinds}; NCCL beyond{tokens}"
        if self.fallback:
            return f"all-reduce over {self.size} ranks: NCCL ({self.fallback})"
        return None

    def check_order(self) -> None:
        """Refuse what `all_reduce` has no fixed order for, after `prepare`.

        Raises:
            ConfigurationError: of more than two summands, which have one sum in any order.
        """
        if self.size > 2 and not any(kind.one_shot_rows for kind in self.symmetric.values()):
            raise ConfigurationError(
                f"batch_invariant_mode=True is not served over {self.size} tensor-parallel ranks "
                f"here: {self.fallback or 'the model is too wide'}. Use at most 2, or leave the "
                "mode out."
            )

    def all_reduce(
        self, x: Tensor, dtype: torch.dtype | None = None, in_order: bool = False
    ) -> Tensor:
        """Sum over the ranks.

        Args:
            x: this rank's summand, contiguous, `[tokens, 1, hidden]`, or partial sums of it,
                `[splits, tokens, 1, hidden]`; it may be overwritten.
            dtype: of the sum; None: as `x`.
            in_order: each token is added in one order, whatever the tokens; see `check_order`.

        Returns:
            the sum, `[tokens, 1, hidden]`. It may lie in a workspace, and is valid until the next
            collective of the group, unless it is passed through `keep`.
        """
        dtype = dtype or x.dtype
        if self.size == 1:
            return add_partial_sums(x, dtype)
        symmetric = self.symmetric.get((x.size(-1), dtype))
        if in_order and self.size > 2:
            self.calls["one shot in slices"] += 1
            return self.symmetric[x.size(-1), dtype].in_order(x)
        if symmetric is not None and symmetric.takes(x):
            self.calls["two shot"] += 1
            return symmetric.all_reduce(x)
        self.calls["nccl" if x.is_cuda else "gloo"] += 1
        x = add_partial_sums(x, dtype)
        dist.all_reduce(x, group=self._group)
        return x

    def keep(self, x: Tensor) -> Tensor:
        """A sum of `all_reduce` that outlives the next collective."""
        return x.clone() if self.symmetric else x

    def adds_with_norm(self, x: Tensor, dtype: torch.dtype | None = None) -> bool:
        """Whether `all_reduce_add_rms_norm` takes an `x` like `all_reduce`'s, for a residual stream
        of `dtype` (None: as `x`)."""
        symmetric = self.symmetric.get((x.size(-1), dtype or x.dtype))
        return symmetric is not None and symmetric.adds_with_norm(x)

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`all_reduce_add_rms_norm` of an `x` as for `all_reduce`, where `adds_with_norm`."""
        self.calls["one shot"] += 1
        symmetric = self.symmetric[x.size(-1), residual.dtype]
        return symmetric.add_rms_norm(x, residual, weight, eps)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum over the ranks, of which each keeps its share of the rows.

        Args:
            x: `[tokens, ...]`, contiguous; zeros are added after it up to a multiple of the ranks.

        Returns:
            `[ceil(tokens / ranks), ...]`: the rows from `rank * len(result)` on.
        """
        x = self.pad_rows(x)
        out = torch.empty((len(x) // self.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        dist.reduce_scatter_tensor(out, x, group=self._group)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """`[rows, ...]` of each rank -> `[rows * ranks, ...]`, in the order of ranks."""
        out = torch.empty((len(x) * self.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
        return out

    def all_gather_columns(self, x: Tensor, columns: int) -> Tensor:
        """Join the ranks' columns.

        Args:
            x: `[..., local columns]`.
            columns: how many of all are wanted; the last ones may be padding.

        Returns:
            `[..., columns]`, contiguous.
        """
        if self.size == 1:
            return x[..., :columns]
        pieces = []
        for rank, piece in enumerate(self.all_gather(x[None]).unbind(0)):
            pieces.append(piece[..., : max(columns - rank * x.size(-1), 0)])
        return torch.cat(pieces, dim=-1)

    def pad_rows(self, x: Tensor) -> Tensor:
        """`x` with zeros after its rows, up to a multiple of the ranks."""
        missing = -len(x) % self.size
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


@cache
def collectives_of(group: dist.ProcessGroup) -> TensorCollectives:
    """The collectives of a group: one object, and one set of workspaces, for all its users."""
    return TensorCollectives(group)
