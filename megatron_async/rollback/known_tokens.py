"""`KnownTokens`: booked tokens of requests, from which device state is computed again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_async.contexts.request_slots import RequestSlots, SlotState
from megatron_async.contexts.step_plan import IntArray
from megatron_async.ops.sampling.slot_records import WINDOW, RowFeature


class KnownTokens(NamedTuple):
    """Tokens that have passed through the device for some slots; int64, host memory.

    Attributes:
        counted: `[slots]` with penalties.
        token_slots: `[tokens]`: for each generated token of theirs, its slot.
        tokens: `[tokens]`.
        recent_slots: `[recent]`: for each of the last tokens of slots with bad words, its slot.
        recent_places: `[recent]`: its position modulo `WINDOW`.
        recent: `[recent]`.
    """

    counted: Tensor
    token_slots: Tensor
    tokens: Tensor
    recent_slots: Tensor
    recent_places: Tensor
    recent: Tensor


def known_tokens(slots: RequestSlots, which: IntArray) -> KnownTokens | None:
    """Gather the tokens of slots that have no step in flight.

    Args:
        slots: per-request state.
        which: slots; those that are free, or have neither penalties nor bad words, do not matter.

    Returns:
        their tokens, copied; None where no slot matters.
    """
    held = which[slots.state[which] != SlotState.FREE]
    counted = held[(slots.features[held] & RowFeature.PENALTIES) != 0]
    banned = held[(slots.features[held] & RowFeature.BAD_WORDS) != 0]
    if len(counted) + len(banned) == 0:
        return None
    begins = slots.state == SlotState.PREFILLING
    ends = np.where(begins, slots.num_prefilled, slots.num_known)
    generated = [np.arange(slots.prompt_length[slot], ends[slot]) for slot in counted]
    last = [np.arange(max(ends[slot] - WINDOW, 0), ends[slot]) for slot in banned]
    token_slots, positions = _columns(counted, generated)
    recent_slots, recent_positions = _columns(banned, last)
    arrays = (
        counted,
        token_slots,
        slots.tokens[token_slots, positions],
        recent_slots,
        recent_positions % WINDOW,
        slots.tokens[recent_slots, recent_positions],
    )
    return KnownTokens(*(torch.from_numpy(array.astype(np.int64)) for array in arrays))


def _columns(which: IntArray, positions: list[IntArray]) -> tuple[IntArray, IntArray]:
    lengths = [len(each) for each in positions]
    return np.repeat(which, lengths), np.concatenate([np.empty(0, np.int64), *positions])
