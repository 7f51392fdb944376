"""Turn scheduling decisions into an immutable `StepPlan`, and count them as launched."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from megatron_async.contexts.batch_dimensions import BatchDimensions
from megatron_async.contexts.request_slots import RequestSlots, SlotState
from megatron_async.contexts.step_plan import BlockUpdates, IntArray, PrefillTokens, StepPlan
from megatron_async.ops.sampling import SamplingMode

_NONE = np.empty(0, dtype=np.int32)
_NO_PREFILL = PrefillTokens(_NONE, _NONE, _NONE)


class PrefillChunk(NamedTuple):
    """Tokens `start` .. `end` - 1 of the sequence in `slot`."""

    slot: int
    start: int
    end: int


class PlanBuilder:
    """Collects block-table updates while a step is scheduled, then builds its plan.

    Args:
        slots: the state that plans are built from and that `build` advances.
        graph_sizes: row counts, ascending, for which a decode-only step has a captured graph; such
            a step is padded to the next of them.

    Attributes:
        next_step: number of the plan that is built next.
    """

    def __init__(self, slots: RequestSlots, graph_sizes: tuple[int, ...] = ()) -> None:
        self._slots = slots
        self._graph_sizes = graph_sizes
        self.next_step = 0
        self._updates: list[tuple[IntArray, IntArray, IntArray]] = []

    def add_block_updates(self, slots: IntArray, indices: IntArray, blocks: IntArray) -> None:
        """Block `blocks[i]` becomes entry `indices[i]` of the table of `slots[i]`."""
        self._updates.append((slots, indices, blocks))

    def build(self, decode: IntArray, chunks: list[PrefillChunk]) -> StepPlan:
        """The plan of a step with these decode slots and prefill chunks (not both empty)."""
        slots = self._slots
        rows, kv_lengths = decode, slots.num_launched[decode]
        produces = np.ones(len(decode) + len(chunks), dtype=np.bool_)
        # Decode rows: their last token goes in, one more comes out.
        slots.num_launched[decode] = kv_lengths + 1
        prefill = _NO_PREFILL
        if chunks:
            ends = np.array([chunk.end for chunk in chunks], dtype=np.int32)
            prefill_slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
            complete = ends == slots.num_known[prefill_slots]
            produces[len(decode) :] = complete
            prefill = self._prefill_tokens(chunks, len(decode))
            slots.num_prefilled[prefill_slots] = ends
            done = prefill_slots[complete]
            slots.num_launched[done] += 1
            slots.state[done] = SlotState.DECODING
            rows = np.concatenate((rows, prefill_slots))
            kv_lengths = np.concatenate((kv_lengths, ends))
        updates = self._take_updates()
        if not chunks and self._graph_sizes and len(decode) <= self._graph_sizes[-1]:
            dims = self.graph_dimensions(len(decode))
        else:
            dims = BatchDimensions(
                decode_rows=len(decode),
                prefill_lengths=tuple((end - start, end) for _, start, end in chunks),
                max_decode_kv_length=int(kv_lengths[: len(decode)].max(initial=0)),
                block_updates=len(updates.slots),
            )
        plan = StepPlan(
            step=self.next_step,
            dims=dims,
            slots=rows,
            generations=slots.generation[rows],
            kv_lengths=kv_lengths,
            produces=produces,
            sampling_mode=SamplingMode(int(slots.sampling_mode[rows].max())),
            block_updates=updates,
            prefill=prefill,
        )
        self.next_step += 1
        return plan

    def graph_dimensions(self, rows: int) -> BatchDimensions:
        """Shape of the smallest captured graph that holds `rows` decode rows. A row starts at most
        one block a step, so as many updates as rows are enough."""
        size = self._graph_sizes[bisect_left(self._graph_sizes, rows)]
        return BatchDimensions(decode_rows=size, block_updates=size, is_captured=True)

    def _take_updates(self) -> BlockUpdates:
        if not self._updates:
            return BlockUpdates(_NONE, _NONE, _NONE)
        columns = zip(*self._updates, strict=True)
        self._updates = []
        return BlockUpdates(*(np.concatenate(column) for column in columns))

    def _prefill_tokens(self, chunks: list[PrefillChunk], first_row: int) -> PrefillTokens:
        tokens = [self._slots.tokens[slot, start:end] for slot, start, end in chunks]
        positions = [np.arange(start, end, dtype=np.int32) for _, start, end in chunks]
        rows = np.arange(first_row, first_row + len(chunks), dtype=np.int32)
        return PrefillTokens(
            np.concatenate(tokens),
            np.concatenate(positions),
            np.repeat(rows, [len(span) for span in tokens]),
        )


def dummy_plan(dims: BatchDimensions) -> StepPlan:
    """A plan of a decode-only shape in which every row is a dummy row."""
    return StepPlan(
        step=0,
        dims=dims,
        slots=_NONE,
        generations=_NONE,
        kv_lengths=_NONE,
        produces=np.empty(0, dtype=np.bool_),
        sampling_mode=SamplingMode.GREEDY,
        block_updates=BlockUpdates(_NONE, _NONE, _NONE),
        prefill=_NO_PREFILL,
    )
