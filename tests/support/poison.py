"""KV blocks and recurrent states that nobody owns hold NaN: a read of what the last owner left,
and a write to a block without an owner or to one that requests share, are found out."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async import DynamicInferenceEngine
from megatron_async.device_state.recurrent_state import RecurrentState
from megatron_async.planning.kv_block_allocator import KVBlockAllocator
from megatron_async.planning.step_plan import IntArray

UNWRITTEN = 6e4
"""Fills a block that is handed out: a finite value, as an earlier owner's, that would change every
token if it were read."""
NOBODYS_EXPERT = 255
NOBODYS_TOKEN, UNWRITTEN_TOKEN = 2**30, 2**30 + 1
"""Fill the tokens of such blocks: a step that counts one of them fails."""


class PoisonedBlocks(KVBlockAllocator):
    """Fills blocks with NaN when they are freed, and checks them when they are handed out again, on
    the compute stream, in order with the steps: steps in flight when a block is freed may still use
    it, later ones may not. A block that was written without an owner fails the stream, and so the
    next wait of the host; and so does one that was written, or has changed, after a second request
    has begun with it. The engine is a new one: its blocks are all free."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        context = engine.context
        super().__init__(context.blocks.total)
        self._compute = context.device.compute
        self._cache = context.gpu_view.kv_cache
        self._shared: dict[int, Tensor] = {}
        """What shared blocks hold, in the memory `_of`."""
        self._of: Tensor | None = None
        self._compute.launch(partial(self._poison, np.arange(self.total)))

    def allocate(self, count: int) -> IntArray:
        blocks = super().allocate(count)
        if count:
            self._compute.launch(partial(self._hand_out, blocks))
        return blocks

    def share(self, blocks: IntArray) -> None:
        super().share(blocks)
        self._compute.launch(partial(self._keep_shared, blocks.tolist()))

    def check_places(self, places: Tensor) -> None:
        """Check the places in the cache, int64 `[tokens]`, to which a step writes."""
        written = self._shared.keys() & (places // self._cache.block_size).tolist()
        assert not written, f"blocks {sorted(written)} are shared, and a step writes to them"

    def _keep_shared(self, blocks: list[int]) -> None:
        if self._of is not self._cache._data:
            self._shared, self._of = {}, self._cache._data
        for block in blocks:
            now = self._cache._data[:, :, block]
            kept = self._shared.setdefault(block, now.clone())
            assert torch.equal(kept, now), f"block {block} has changed since it is shared"

    def _push(self, blocks: IntArray) -> None:
        """Nobody owns or remembers `blocks` any more."""
        super()._push(blocks)
        if len(blocks):
            self._compute.launch(partial(self._poison, blocks))

    def clear(self) -> None:
        super().clear()
        if hasattr(self, "_compute"):
            self.poison_free_blocks()

    def check_free_blocks(self) -> None:
        """Check, on the compute stream, that nobody has written to a free block."""
        self._compute.launch(partial(self._check, self._free_blocks()))

    def poison_free_blocks(self) -> None:
        """Fill all free blocks: the cache was allocated anew."""
        self._compute.launch(partial(self._poison, self._free_blocks()))

    def _free_blocks(self) -> IntArray:
        return self.ownerless_blocks()[: self.free]

    def _poison(self, blocks: IntArray) -> None:
        data = self._cache._data
        if data is not None:  # else the engine is suspended, and `poison_free_blocks` follows
            self._keep_shared([block for block in blocks.tolist() if block in self._shared])
            for block in blocks.tolist():
                self._shared.pop(block, None)
            data[:, :, torch.from_numpy(blocks)] = torch.nan
            self._fill_tokens(blocks, NOBODYS_TOKEN)
            if self._cache.block_routing is not None:
                self._cache.block_routing[torch.from_numpy(blocks)] = NOBODYS_EXPERT

    def _hand_out(self, blocks: IntArray) -> None:
        self._check(blocks)
        self._cache._data[:, :, torch.from_numpy(blocks)] = UNWRITTEN
        self._fill_tokens(blocks, UNWRITTEN_TOKEN)

    def _fill_tokens(self, blocks: IntArray, token: int) -> None:
        if self._cache.block_tokens is not None:
            self._cache.block_tokens[torch.from_numpy(blocks)] = token

    def _check(self, blocks: IntArray) -> None:
        data = self._cache._data[:, :, torch.from_numpy(blocks)]
        clean = data.isnan().all(-1).all(-1).all(-1)
        clean = clean.all(0).all(0)
        if self._cache.block_tokens is not None:
            tokens = self._cache.block_tokens[torch.from_numpy(blocks)]
            clean &= (tokens == NOBODYS_TOKEN).all(1)
        written = blocks[~clean.numpy()]
        assert not len(written), f"blocks {written} were written while nobody owned them"


def poison_blocks(engine: DynamicInferenceEngine) -> PoisonedBlocks:
    """Give a new engine blocks that are watched."""
    context, view = engine.context, engine.context.gpu_view
    blocks = context.blocks = context.scheduler._blocks = PoisonedBlocks(engine)
    if context.prefix_cache is not None:
        context.prefix_cache._blocks = blocks
    begin_step = view.begin_step

    def begin_and_check(*arguments: Any) -> None:
        begin_step(*arguments)
        blocks.check_places(view.step.write_indices.flatten())

    view.begin_step = begin_and_check  # type: ignore[method-assign]
    return blocks


def poison_states(engine: DynamicInferenceEngine) -> None:
    """Fill all rows of an engine's state pools, the dummy slot's too, and from now on each row
    that is released. It happens on the compute stream, in order with the steps: those in flight
    when a row is released may still use its state, later ones may not. Without recurrent layers
    nothing happens."""
    context = engine.context
    state = context.gpu_view.states.find(RecurrentState)
    if state is None:
        return
    release = context.slots.release

    def poison(rows: slice) -> None:
        for pools in state._layers:
            for pool in pools:
                pool[rows] = math.nan

    def poison_later(row: int) -> None:
        context.device.compute.launch(partial(poison, slice(row, row + 1)))

    def release_and_poison(slot: int) -> IntArray:
        blocks = release(slot)
        poison_later(slot)
        return blocks

    class PoisonedRows(list[int]):
        """Free rows."""

        def append(self, row: int) -> None:
            super().append(row)
            poison_later(row)

    cache = context.prefix_cache
    if cache is not None and cache.states is not None:
        cache.states._free = PoisonedRows(cache.states._free)
    else:
        context.slots.release = release_and_poison  # type: ignore[method-assign]
    context.device.compute.launch(partial(poison, slice(None)))


def spoil_logits(
    engine: DynamicInferenceEngine, position: int, column: Any = 7, value: float = torch.nan
) -> None:
    """Spoil a logit of every row from which a token at `position` or behind it is drawn."""
    wrapper = engine.controller.inference_wrapped_model
    forward = wrapper.forward

    def forward_and_spoil(view: Any) -> torch.Tensor:
        logits = forward(view).clone()
        rows = (view.step.sample_positions >= position).nonzero()[:, 0]
        logits[rows, column] = value
        return logits

    wrapper.forward = forward_and_spoil  # type: ignore[method-assign]
