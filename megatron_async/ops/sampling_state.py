"""`SamplingState`: what the sampling of a request's next token remembers of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_async.contexts.known_tokens import KnownTokens

PROMPT_TOKEN = 1 << 30
"""Bit of a count: the token is in the prompt. The bits below count it among the generated ones."""


class SamplingState:
    """Per-slot arrays of the steps with processed logits; one row more than there are slots, as in
    `DeviceSlots`. Kept up by the steps themselves, on the compute stream: they never see a token
    that is not sampled yet.

    Args:
        capacity: slots.
        vocab_size: tokens.
        window: recent tokens kept for bad words.
        device: where the arrays live.

    Attributes:
        counts: int32 `[slots + 1, vocabulary]`: see `PROMPT_TOKEN`; kept for rows with penalties.
        recent: int32 `[slots + 1, window]`: the generated token at position p is at p % window;
            kept for rows with bad words.
    """

    def __init__(self, capacity: int, vocab_size: int, window: int, device: torch.device) -> None:
        self.counts: Tensor = torch.zeros(
            capacity + 1, vocab_size, dtype=torch.int32, device=device
        )
        self.recent: Tensor = torch.zeros(capacity + 1, window, dtype=torch.int32, device=device)

    def rebuild(self, known: KnownTokens) -> None:
        """Forget the generated tokens of these slots but the known ones; prompt tokens stay marked,
        because marking them again changes nothing."""
        counted, token_slots, tokens, recent_slots, places, recent = (
            tensor.to(self.counts.device) for tensor in known
        )
        prompts = self.counts.index_select(0, counted) & PROMPT_TOKEN
        self.counts.index_copy_(0, counted, prompts)
        ones = torch.ones_like(tokens, dtype=torch.int32)
        self.counts.index_put_((token_slots, tokens), ones, accumulate=True)
        self.recent.index_put_((recent_slots, places), recent.int())
