"""The n-gram drafter: drafts from earlier tokens of a sequence (`ops/drafting/ngram_lookup.py`)."""

from __future__ import annotations

from torch import Tensor

from megatron_async.device_state.gpu_view import ContextGPUView


class NgramDrafter:
    """Proposes the tokens that followed an earlier occurrence of a row's last tokens. It has no
    weights and no state: it reads only the token ids that the cache keeps beside the keys. So it
    needs no code for a new owner of a slot, an eviction or a shared prefix."""

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        """Drafts of a step's rows; see `Drafter.propose`. Drafts of a chunk that is not its
        prompt's last are meaningless."""
        tokens, slots, step = view.kv_cache.block_tokens, view.slots, view.step
        assert tokens is not None, "the cache keeps tokens where this drafter is chosen"
        return view.ops.ngram_drafts(
            tokens,
            step.block_tables[:, : slots.block_table.size(1) // len(step.write_indices)],
            step.row_slots,
            slots.length,
            slots.last_token,
            slots.records,
            count,
        )
