"""Where the rows of recurrent layers stand: what the ops of all kinds of layers are given."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows


class DecodeRows:
    """Decode rows at all phases of the flush rule; a step of `width` tokens was before this one.

    Args:
        rows: of the step.
        width: query tokens of a row.
        rule: says when a row writes its state.

    Attributes:
        index: int64 `[rows]`, each row's place in the pools.
        before, after: int32 `[rows]`, where the rings began before the step, and begin now.
        positions: int64 `[rows * width]`, of the query tokens.
    """

    def __init__(self, rows: int, width: int, rule: FlushRule) -> None:
        first = 1000 + torch.arange(rows, device="cuda") * 7 % rule.period
        self.before = ((first - width) // rule.period * rule.period).int()
        self.after = (first // rule.period * rule.period).int()
        self.positions = (first[:, None] + torch.arange(width, device="cuda")).view(-1)
        self.index = torch.arange(rows, device="cuda")


def prefill_rows(lengths: list[int], rule: FlushRule) -> tuple[PrefillRows, Tensor]:
    """Whole prompts of these lengths, and where the rings begin after them, int32 `[prompts]`."""
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    index = torch.arange(len(lengths), device="cuda")
    rows = PrefillRows(ends, torch.zeros_like(ends[1:]), index, index, torch.ones_like(ends[1:]))
    return rows, (ends.diff() // rule.period * rule.period).int()
