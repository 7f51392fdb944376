"""The n-gram drafter: a sequence is its own dictionary (`ops/drafting/ngram_lookup.py`)."""

from __future__ import annotations

from torch import Tensor

from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.ops.kernels import kernels_for


class NgramDrafter:
    """Proposes what stood behind a row's last tokens when they came before. It has no weights and
    no state: the tokens that the cache keeps beside the keys are all that it reads, so a new owner
    of a slot, an eviction or a shared prefix needs nothing of it."""

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        """Drafts of a step's rows; see `Drafter.propose`. Those of a chunk that leaves a part of
        its prompt mean nothing."""
        tokens, slots, step = view.kv_cache.block_tokens, view.slots, view.step
        assert tokens is not None, "the cache keeps tokens where this drafter is chosen"
        return kernels_for(tokens).ngram_drafts(
            tokens,
            step.block_tables,
            step.row_slots,
            slots.length,
            slots.last_token,
            slots.records,
            count,
        )
