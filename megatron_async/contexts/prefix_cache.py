"""`PrefixCache`: which blocks hold the keys and values of which tokens, for requests that begin
alike.

An index on top of `KVBlockAllocator`, which keeps the blocks that nobody owns any more. All of it
follows from the plans: no clock and no order of a dictionary decides, so ranks that replay one log,
and a replay of a recording, find the same.

A block of a prompt is entered when the step that writes it is planned: steps run in the order of
their launch, so any later one may read it. A block with generated tokens may be entered once its
tokens are known and a step that feeds the last of them is planned. That is done when somebody looks
for blocks, or its request leaves: steps in which nobody comes or goes pay nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_async.contexts.kv_block_allocator import KVBlockAllocator
from megatron_async.contexts.prefix_hashes import block_hashes
from megatron_async.contexts.request_slots import ALL, NO_SLOTS, RequestSlots, SlotState
from megatron_async.contexts.step_plan import IntArray, StepPlan

if TYPE_CHECKING:
    from megatron_async.requests.inference_request import DynamicInferenceRequest


class PrefixCache:
    """Finds blocks for requests, and enters those that steps fill.

    Args:
        slots: the books.
        blocks: their allocator.
        block_size: tokens of a block.

    Attributes:
        queries: tokens of admitted requests.
        hits: of these, the ones that were found.
        evictions: blocks that were handed out to others while they could be found.
        losses: blocks that can be found no more, for whatever reason.
    """

    def __init__(self, slots: RequestSlots, blocks: KVBlockAllocator, block_size: int) -> None:
        self._slots, self._blocks, self._size = slots, blocks, block_size
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * blocks.total
        self._written_by = np.zeros(blocks.total, dtype=np.int64)
        """The plan that a block was entered with."""
        self._entered = np.zeros(slots.capacity, dtype=np.int32)
        """Blocks of a slot's request, from its beginning, that were entered or need not be."""
        self._is_stale = np.zeros(slots.capacity, dtype=np.bool_)
        """Whether the slot's request began before `reset`."""
        self.queries = 0
        self.hits = 0
        self.evictions = 0
        self.losses = 0

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._block_of)

    def prepare(self, request: DynamicInferenceRequest) -> None:
        """Hash a new request's prompt, off the way of any step."""
        request.block_hashes = block_hashes(request.prompt_tokens, self._size, _salt(request))

    def find(
        self, request: DynamicInferenceRequest, num_known: int, step: int
    ) -> tuple[IntArray, bool]:
        """The blocks that hold a request's first tokens, but never all of them: one is computed.

        Args:
            request: that waits.
            num_known: its tokens.
            step: number of the plan that is made.

        Returns:
            int32 `[n]`, and whether the block behind them is written by this very plan: then the
            request does best to wait for the next one.
        """
        self._take_notice()
        if not _takes_hits(request):
            return NO_SLOTS, False
        self._catch_up(step - 1)
        found: list[int] = []
        for each in request.block_hashes[: (num_known - 1) // self._size]:
            block = self._block_of.get(each)
            if block is None:
                break
            if self._written_by[block] >= step:
                return np.array(found, dtype=np.int32), True
            found.append(block)
        return np.array(found, dtype=np.int32), False

    def begin(self, slot: int, num_known: int) -> None:
        """A request was given `slot`, with blocks that were found or without."""
        cached = int(self._slots.num_cached[slot])
        self._entered[slot] = cached // self._size
        self._is_stale[slot] = False
        self.queries += num_known
        self.hits += cached

    def written(self, slot: int, end: int, step: int) -> None:
        """A chunk that reaches to token `end` - 1 of `slot` is in plan `step`."""
        if not self._is_stale[slot]:
            self._enter(slot, end // self._size, step)

    def leaves(self, slot: int, step: int) -> None:
        """The request in `slot` is about to give its blocks back; `step` was planned last."""
        if self._slots.state[slot] >= SlotState.DECODING and not self._is_stale[slot]:
            self._enter(slot, int(self._held(slot)), step)

    def failed(self, plan: StepPlan) -> None:
        """A step has failed: what it and later ones were to write is not there, and its requests
        enter nothing more."""
        held = self._slots.generation[plan.slots] == plan.generations
        self._is_stale[plan.slots[held]] = True
        known = self._findable()
        self._forget(known[self._written_by[known] >= plan.step])

    def reset(self) -> None:
        """Forget everything; requests that hold a slot enter nothing more."""
        self._forget(self._findable())
        self._is_stale[:] = True

    def _catch_up(self, step: int) -> None:
        """Enter what decoding requests have filled; `step` was planned last."""
        held = self._held(ALL)
        due = (held > self._entered) & (self._slots.state >= SlotState.DECODING) & ~self._is_stale
        if np.count_nonzero(due):
            slots = np.flatnonzero(due)
            for slot, count in zip(slots.tolist(), held[slots].tolist()):  # sync-ok: NumPy
                self._enter(slot, count, step)

    def _held(self, slots: IntArray | slice | int) -> IntArray:
        """Blocks of decoding `slots` whose tokens are known, and fed by the steps in flight at the
        latest: the token that the last of these yields is not, nor a sequence's last token."""
        books = self._slots
        fed = np.minimum(books.at_least(slots), books.max_length[slots]) - 1
        return np.minimum(books.num_known[slots], fed) // self._size

    def _enter(self, slot: int, count: int, step: int) -> None:
        """Enter blocks of `slot` up to `count` of them."""
        self._take_notice()
        request, size = self._slots.request_at(slot), self._size
        hashes, begin = request.block_hashes, int(self._entered[slot])
        if count > len(hashes):
            tokens = self._slots.tokens[slot, len(hashes) * size : count * size]
            parent = hashes[-1] if hashes else b""
            hashes += block_hashes(tokens, size, _salt(request), parent)
        blocks = self._slots.block_table[slot, begin:count]
        new = []
        for block, each in zip(blocks.tolist(), hashes[begin:count]):  # sync-ok: NumPy
            # Of two blocks with the same tokens the first is kept.
            if each not in self._block_of:
                self._block_of[each] = block
                self._hash_of[block] = each
                new.append(block)
        if new:
            self._blocks.remember(np.array(new, dtype=np.int32))
            self._written_by[new] = step
        self._entered[slot] = max(count, begin)

    def _findable(self) -> IntArray:
        """Blocks that can be found, int32."""
        self._take_notice()
        return np.fromiter(self._block_of.values(), dtype=np.int32, count=len(self._block_of))

    def _take_notice(self) -> None:
        """Of blocks that were handed out to others."""
        lost, self._blocks.forgotten = self._blocks.forgotten, []
        self.evictions += len(lost)
        self._drop(lost)

    def _forget(self, blocks: IntArray) -> None:
        self._drop(blocks.tolist())  # sync-ok: NumPy
        self._blocks.forget(blocks)

    def _drop(self, blocks: list[int]) -> None:
        self.losses += len(blocks)
        for block in blocks:
            each = self._hash_of[block]
            if each is not None:
                del self._block_of[each]
                self._hash_of[block] = None


def _salt(request: DynamicInferenceRequest) -> bytes:
    return (request.sampling_params.cache_salt or "").encode()


def _takes_hits(request: DynamicInferenceRequest) -> bool:
    """Whether a request may begin behind tokens that its own steps do not see: not if log probs of
    its prompt are wanted."""
    return request.log_probs is None or not request.log_probs.num_prompt_missing
