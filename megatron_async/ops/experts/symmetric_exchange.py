"""The exchanges of an expert-parallel group over symmetric memory: workspaces and their choice.

A decode step of a model with 48 layers has 96 exchanges of some kilobytes. NCCL's take longer than
the transfer of the bytes, and the gather needs four kernels before it that pack the rows. Here each
exchange is one kernel (`ops/experts/expert_exchange.py`, `ops/experts/expert_exchange.py`), up to
`EXCHANGE_BYTES`; NCCL serves larger steps.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.ops.experts.expert_exchange import (
    WORD,
    combine_add_rms_norm,
    combine_sums,
    gather_tokens,
    packed_row_bytes,
)
from megatron_async.ops.experts.expert_routing import Routing
from megatron_async.ops.ranks.symmetric_memory import flag_bytes, make_on_all, share, tell_group

EXCHANGE_BYTES = 4 << 20
"""Most bytes that a rank reads from others in one exchange: enough for decode steps. On 4 H200s our
kernels were ahead of NCCL at all sizes tried, up to three times this
(docs/records/several_gpus.md); more takes more memory."""
LIMIT_VARIABLE = "MEGATRON_ASYNC_EXCHANGE_BYTES"
"""Environment variable that stands in for `EXCHANGE_BYTES`; 0: NCCL serves all steps. Of several
ranks' values the least counts."""
MAX_PROGRAM_BYTES = 128 << 10
"""Rows of all ranks that a program holds in its registers."""


class SymmetricExchange:
    """Workspaces of a group, made once, and the kernels on them.

    Args:
        group: the ranks, all on this host.
        tokens: most of each rank, the same on all ranks.
        hidden: elements of a token.
        topk: experts of a token.
        dtype: of the tokens and sums.
        device: of this rank.

    Attributes:
        tokens: the argument.

    Raises:
        RuntimeError: the memory cannot be shared.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tokens: int,
        hidden: int,
        topk: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        self._rank = group.rank()
        ranks = group.size()
        flags = flag_bytes(tokens, ranks)
        words = packed_row_bytes(hidden, topk, dtype) // WORD
        self._first_word, self._first_sum = flags // WORD, flags // dtype.itemsize
        self._rows, self._gathers = share(
            self._first_word + 2 * tokens * words, torch.int32, device, group
        )
        self._sums, self._combines = share(
            self._first_sum + 2 * tokens * ranks * hidden, dtype, device, group
        )
        self._gather_turns, self._combine_turns = torch.zeros(
            (2, tokens), dtype=torch.int32, device=device
        ).unbind()
        torch.cuda.synchronize(device)  # sync-ok: at the start

    def gather(self, x: Tensor, routing: Routing, tokens: int) -> Tensor:
        """Gather the tokens of all expert ranks: `ops.experts.expert_gather.gather_tokens`."""
        return gather_tokens(
            x, routing, tokens, self._gathers, self._gather_turns, self._rank, self._first_word
        )

    def combine(self, sums: Tensor, own_tokens: int) -> Tensor:
        """Add the partial sums of all expert ranks: `ops.experts.expert_exchange.combine_sums`."""
        return combine_sums(
            sums, own_tokens, self._combines, self._combine_turns, self._rank, self._first_sum
        )

    def combine_add_rms_norm(
        self, sums: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Combine, residual add and RMSNorm in one kernel (`ops/experts/expert_exchange.py`)."""
        return combine_add_rms_norm(
            sums,
            residual,
            weight,
            eps,
            self._combines,
            self._combine_turns,
            self._rank,
            self._first_sum,
        )


class ExpertExchange:
    """Which exchanges of one group go through symmetric memory; get it by `exchange_of`.

    Args:
        group: the ranks.

    Attributes:
        symmetric: what `prepare` has made, by width, experts of a token and dtype. They stay,
            because captured steps hold their addresses.
        fallback: why there are none, or "".
        calls: exchanges of eager and captured steps by kernel, as they were enqueued.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.symmetric: dict[tuple[int, int, torch.dtype], SymmetricExchange] = {}
        self.fallback = ""
        self.calls: Counter[str] = Counter()

    def prepare(
        self, max_tokens: int, hidden: int, topk: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make the workspaces of the largest step that they serve, before the first; all ranks
        together.

        Args:
            max_tokens: most tokens of a rank's step.
            hidden: width of the residual stream.
            topk: experts of a token.
            dtype: of tokens and sums.
            device: of the model.

        Raises:
            ConfigurationError: `LIMIT_VARIABLE` is not a number of bytes.
        """
        ranks = self._group.size()
        if ranks == 1 or device.type != "cuda":
            return
        if (hidden, topk, dtype) in self.symmetric or self.fallback:
            return
        wanted = self._least(self._largest(max_tokens, hidden, topk, dtype))
        if not wanted:
            self.fallback = f"{LIMIT_VARIABLE} is less than a token, or the model is too wide"
            return
        made, self.fallback = make_on_all(
            self._group,
            lambda: SymmetricExchange(self._group, wanted, hidden, topk, dtype, device),
        )
        if made is not None:
            self.symmetric[hidden, topk, dtype] = made

    def find(
        self, tokens: int, hidden: int, topk: int, dtype: torch.dtype
    ) -> SymmetricExchange | None:
        """The exchange for so many tokens of each rank; the same on all ranks."""
        found = self.symmetric.get((hidden, topk, dtype))
        return found if found is not None and tokens <= found.tokens else None

    @property
    def report(self) -> str | None:
        """The exchange for each range of sizes, with reasons; None if there is no choice."""
        ranks = self._group.size()
        if self.symmetric:
            tokens = ", ".join(str(found.tokens) for found in self.symmetric.values())
            return (
                f"exchange of experts' tokens over {ranks} ranks: one kernel up to {tokens} tokens "
                "a rank, over symmetric memory; NCCL beyond"
            )
        if self.fallback:
            return f"exchange of experts' tokens over {ranks} ranks: NCCL ({self.fallback})"
        return None

    def _largest(self, max_tokens: int, hidden: int, topk: int, dtype: torch.dtype) -> int:
        """Tokens of a rank that the kernels take by this rank's limit."""
        ranks, row = self._group.size(), hidden * dtype.itemsize
        held = triton.next_power_of_2(ranks) * triton.next_power_of_2(row)
        if held > MAX_PROGRAM_BYTES or row % WORD:
            return 0
        read = (ranks - 1) * packed_row_bytes(hidden, topk, dtype)
        return min(max_tokens, _limit() // read)

    def _least(self, value: int) -> int:
        return min(map(int, tell_group(self._group, "limits of exchanges", str(value))))


@cache
def exchange_of(group: dist.ProcessGroup) -> ExpertExchange:
    """The exchange of a group: one object, and one set of workspaces, for all its users."""
    return ExpertExchange(group)


def _limit() -> int:
    text = os.environ.get(LIMIT_VARIABLE, str(EXCHANGE_BYTES))
    if not text.isdecimal():
        raise ConfigurationError(f"{LIMIT_VARIABLE}={text!r} must be a number of bytes, 0 or more.")
    return int(text)
