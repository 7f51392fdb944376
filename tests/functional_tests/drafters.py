"""Drafters that know the answers, for tests: always right, always wrong, and now this, now that.

They are a part of the step, so they work on the device alone: a row's request is known by its seed,
which the tests make the number of the request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_async.contexts.gpu_view import ContextGPUView
from megatron_async.ops.philox import philox4x32
from megatron_async.ops.slot_records import Header


class Oracle:
    """Proposes what plain decoding says; nothing behind the end of what it knows.

    Args:
        answers: by seed, the whole sequence of a request, prompt and tokens.
        vocab_size: tokens.
    """

    def __init__(self, answers: Sequence[Sequence[int]], vocab_size: int) -> None:
        longest = max(map(len, answers))
        self.vocab_size = vocab_size
        self._answers = torch.full((len(answers) + 1, longest), -1, dtype=torch.int64)
        for seed, answer in enumerate(answers):
            self._answers[seed, : len(answer)] = torch.tensor(answer)

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        """The answers behind each row's last token."""
        positions, seeds = self.places(view, count)
        self._answers = self._answers.to(positions.device)
        rows, longest = self._answers.shape
        known = self._answers[seeds.clamp(max=rows - 1)]
        found = known.gather(1, positions.clamp(max=longest - 1))
        return torch.where(positions < longest, found, -1)

    def places(self, view: ContextGPUView, count: int) -> tuple[Tensor, Tensor]:
        """Positions of the drafts, int64 `[rows, count]`, and seeds, int64 `[rows]`."""
        slots, owners = view.slots, view.step.row_slots
        seeds = slots.records[:, Header.SEED_LOW].index_select(0, owners).long()
        length = slots.length.index_select(0, owners).long()
        return length[:, None] + torch.arange(count, device=length.device), seeds


class AlwaysWrong(Oracle):
    """Proposes another token than the answer's everywhere."""

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        """The next token id each."""
        return (super().propose(view, count) + 1) % self.vocab_size


class Fickle(Oracle):
    """Right, any token, or nothing, by seed and position."""

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        """A third each, of which a rest is right by chance."""
        right = super().propose(view, count)
        positions, seeds = self.places(view, count)
        zero = torch.zeros_like(positions)
        first, second, *_ = philox4x32(
            [positions, zero, zero, zero], [seeds[:, None] + zero, zero + 77]
        )
        kind = first % 4
        return torch.where(
            kind < 2, right, torch.where(kind == 2, second % self.vocab_size, zero - 1)
        )


DRAFTERS = {"oracle": Oracle, "wrong": AlwaysWrong, "fickle": Fickle}
