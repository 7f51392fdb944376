"""The exchanges of an expert-parallel group over symmetric memory: workspaces and their choice.

A decode step of a model with 48 layers has 96 exchanges of some kilobytes. NCCL's take longer than
the transfer of the bytes, and the gather needs four kernels before it that pack the rows. Here each
exchange is one kernel (`ops/experts/expert_exchange.py`), up to `EXCHANGE_BYTES`; NCCL serves
larger steps.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton

from megatron_async.errors import ConfigurationError
from megatron_async.ops.experts.expert_exchange import WORD, packed_row_bytes
from megatron_async.ops.ranks.symmetric_memory import (
    Meeting,
    make_meeting,
    make_on_all,
    tell_group,
)

EXCHANGE_BYTES = 4 << 20
"""Most bytes that a rank reads from others in one exchange: enough for decode steps. On 4 H200s our
kernels were ahead of NCCL at all sizes tried, up to three times this
(docs/records/several_gpus.md); more takes more memory."""
LIMIT_VARIABLE = "MEGATRON_ASYNC_EXCHANGE_BYTES"
"""Environment variable that stands in for `EXCHANGE_BYTES`; 0: NCCL serves all steps. Of several
ranks' values the least counts."""
MAX_PROGRAM_BYTES = 128 << 10
"""Rows of all ranks that a program holds in its registers."""


class SymmetricExchange(NamedTuple):
    """Workspaces of a group for `gather_tokens`, and for `combine_sums`."""

    gathers: Meeting
    combines: Meeting


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
        together. `max_tokens` are those of a rank's step.

        Raises:
            ConfigurationError: `LIMIT_VARIABLE` is not a number of bytes.
        """
        ranks = self._group.size()
        if ranks == 1 or device.type != "cuda":
            return
        if (hidden, topk, dtype) in self.symmetric or self.fallback:
            return
        largest = str(self._largest(max_tokens, hidden, topk, dtype))
        wanted = min(map(int, tell_group(self._group, "limits of exchanges", largest)))
        if not wanted:
            self.fallback = f"{LIMIT_VARIABLE} is less than a token, or the model is too wide"
            return
        words = packed_row_bytes(hidden, topk, dtype) // WORD
        made, self.fallback = make_on_all(
            self._group,
            lambda: SymmetricExchange(
                make_meeting(self._group, wanted, words, torch.int32, device),
                make_meeting(self._group, wanted, ranks * hidden, dtype, device),
            ),
        )
        if made is not None:
            self.symmetric[hidden, topk, dtype] = made

    def find(
        self, tokens: int, hidden: int, topk: int, dtype: torch.dtype
    ) -> SymmetricExchange | None:
        """The exchange for so many tokens of each rank; the same on all ranks."""
        found = self.symmetric.get((hidden, topk, dtype))
        return found if found is not None and tokens <= found.gathers.places else None

    @property
    def report(self) -> str | None:
        """The exchange for each range of sizes, with reasons; None if there is no choice."""
        ranks = self._group.size()
        if self.symmetric:
            tokens = ", ".join(str(found.gathers.places) for found in self.symmetric.values())
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


@cache
def exchange_of(group: dist.ProcessGroup) -> ExpertExchange:
    """The exchange of a group: one object, and one set of workspaces, for all its users."""
    return ExpertExchange(group)


def _limit() -> int:
    text = os.environ.get(LIMIT_VARIABLE, str(EXCHANGE_BYTES))
    if not text.isdecimal():
        raise ConfigurationError(f"{LIMIT_VARIABLE}={text!r} must be a number of bytes, 0 or more.")
    return int(text)
