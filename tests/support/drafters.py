"""Drafters that know the answers, for tests: always right, always wrong, and now this, now that.

Drafters are a part of the step, so they work on the device alone. A row's request is known by its
seed: the tests set the seed to the number of the request.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.ops.sampling.philox import philox4x32
from megatron_async.ops.sampling.slot_records import Header


class Oracle:
    """Proposes what plain decoding says; nothing after the end of the text that it knows: by seed,
    the whole sequence of a request. `room` is (answers, tokens of one); None: for `answers`."""

    def __init__(
        self, answers: Sequence[Sequence[int]], vocab_size: int, room: tuple[int, int] | None = None
    ) -> None:
        count, longest = room or (len(answers), max(map(len, answers)))
        self.vocab_size = vocab_size
        # The last answer is for all seeds that nobody has taught: nothing.
        self._answers = torch.full((count + 1, longest), -1, dtype=torch.int64)
        self._seeds = torch.full((count,), -(2**40), dtype=torch.int64)
        self._taught = 0
        for seed, answer in enumerate(answers):
            self.teach(seed, answer)

    def teach(self, seed: int, answer: Sequence[int]) -> None:
        """One more answer, prompt and tokens, in the place of the oldest where there is no room;
        `seed` is the low word of the request's record."""
        known = (self._seeds == seed).nonzero()
        row = int(known[0]) if len(known) else self._taught % len(self._seeds)
        self._taught += not len(known)
        self._seeds[row] = seed
        self._answers[row] = -1
        self._answers[row, : len(answer)] = torch.tensor(answer)

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        """The answers after each row's last token."""
        positions, seeds = self.places(view, count)
        self._answers = self._answers.to(positions.device)
        self._seeds = self._seeds.to(positions.device)
        is_known = self._seeds == seeds[:, None]
        row = torch.where(is_known.any(dim=1), is_known.int().argmax(dim=1), len(self._seeds))
        longest = self._answers.size(1)
        found = self._answers[row].gather(1, positions.clamp(max=longest - 1))
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
