"""Turn scheduling decisions into an immutable `StepPlan`, and count them as launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_async.device_state.state_table import StatePlan
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.ops.sampling.slot_records import NO_TOKEN, RowFeature
from megatron_async.planning.graph_shapes import GraphShapes
from megatron_async.planning.request_slots import NO_SLOTS, DecodeRows, RequestSlots, SlotState
from megatron_async.planning.step_plan import (
    NO_FEATURES,
    BlockUpdates,
    IntArray,
    PlanFeatures,
    PromptSpan,
    StepPlan,
    StepShape,
)

_NONE = np.empty(0, dtype=np.int32)
_NO_UPDATES = BlockUpdates(NO_SLOTS, _NONE, _NONE)
_NO_STARTS = np.zeros(1, dtype=np.int32)
OF_PROMPTS = int(RowFeature.LOG_PROBS)
OF_SCORES = int(RowFeature.LOG_PROBS | RowFeature.PROCESSED_LOG_PROBS | RowFeature.EDITS)
"""Features that log probs of a prompt heed: they are raw, but for a score."""


class PrefillChunk(NamedTuple):
    """Tokens `start` .. `end` - 1 of the sequence in `slot`."""

    slot: int
    start: int
    end: int


PlanStates = Callable[[DecodeRows, list[PrefillChunk], int], StatePlan | None]
"""From a step's decode rows and chunks and its number: what they read and write of recurrent
states."""


class PlanBuilder:
    """Collects block-table updates while a step is scheduled, then builds its plan.

    Args:
        slots: the state that plans are built from and that `build` advances.
        graph_shapes: shapes that have a captured graph; a step is padded to the smallest that holds
            it. None: none has.

    Attributes:
        next_step: number of the plan that is built next.
        plan_states: asked for each plan; None where recurrent states are not shared.
    """

    def __init__(self, slots: RequestSlots, graph_shapes: GraphShapes | None = None) -> None:
        self._slots = slots
        self._graph_shapes = graph_shapes or GraphShapes()
        self.next_step = 0
        self.plan_states: PlanStates | None = None
        self._updates: list[tuple[IntArray, IntArray, IntArray]] = []
        # Of steps in which every row yields one token: never written.
        self._ones = np.ones(slots.capacity, dtype=np.int32)
        self._all = np.ones(slots.capacity, dtype=np.bool_)

    def add_block_updates(self, slots: IntArray, indices: IntArray, blocks: IntArray) -> None:
        """Block `blocks[i]` becomes entry `indices[i]` of the table of `slots[i]`."""
        self._updates.append((slots, indices, blocks))

    def clear(self) -> None:
        """Drop all block updates for the next plan."""
        self._updates = []

    def drop_block_updates(self, slot: int) -> None:
        """Drop the block updates of a released slot for the next plan, which was not built."""
        kept = [(update, update[0] != slot) for update in self._updates]
        self._updates = [(a[keep], b[keep], c[keep]) for (a, b, c), keep in kept]

    @property
    def num_updates(self) -> int:
        """Block-table updates of the step that is being scheduled."""
        return sum(len(slots) for slots, _, _ in self._updates)

    def shape_of(self, decode: DecodeRows, chunks: list[PrefillChunk]) -> StepShape:
        """How large a step with these decode rows and prefill chunks is."""
        count, width = len(decode.slots), decode.width
        if not chunks:
            return StepShape(count, tokens=count * width, width=width)
        prefill_tokens = sum(end - start for _, start, end in chunks)
        return StepShape(
            decode_rows=count,
            prefill_rows=len(chunks),
            prefill_tokens=prefill_tokens,
            tokens=count * width + prefill_tokens,
            is_eager=int(any(self._slots.forces_routing[slot] for slot, _, _ in chunks)),
            width=width,
        )

    def build(
        self, decode: DecodeRows, chunks: list[PrefillChunk], shape: StepShape | None = None
    ) -> StepPlan:
        """The plan of a step with these decode rows and prefill chunks (of further slots). `shape`
        holds them; None: it is their own."""
        shape = shape or self.shape_of(decode, chunks)
        slots, (rows, width, kv_at_most, short_of_blocks) = self._slots, decode
        num_decode = len(rows)
        produces = self._all[: num_decode + len(chunks)]
        widths = self._ones[: num_decode + len(chunks)]
        if width > 1:
            widths = widths.copy()
            widths[:num_decode] = slots.widths_of(rows, width)
        # Decode rows: their last token goes in, and drafts; one to `widths` tokens come out.
        states = None
        if self.plan_states is not None:
            states = self.plan_states(decode, chunks, self.next_step)
        slots.count_launched(rows, widths[:num_decode])
        starts, token_ids = _NO_STARTS, _NONE
        step_features = following = _NONE
        forced = None
        if chunks:
            ends = np.array([chunk.end for chunk in chunks], dtype=np.int32)
            prefill_slots = np.array([chunk.slot for chunk in chunks], dtype=np.int64)
            complete = ends == slots.num_known[prefill_slots]
            produces = produces.copy()
            produces[num_decode:] = complete
            step_features = complete * np.int32(RowFeature.PRODUCES)
            begins = slots.num_prefilled[prefill_slots]
            step_features[begins == slots.num_cached[prefill_slots]] |= RowFeature.STARTS
            step_features[begins < slots.num_shared[prefill_slots]] |= RowFeature.REPEATS
            known = slots.tokens[prefill_slots, np.where(complete, 0, ends)]
            following = np.where(complete, np.int32(NO_TOKEN), known)
            spans = [slots.tokens[slot, start:end] for slot, start, end in chunks]
            token_ids = np.concatenate(spans)
            starts = np.cumsum([0, *map(len, spans)], dtype=np.int32)
            slots.num_prefilled[prefill_slots] = ends
            done = prefill_slots[complete]
            slots.count_launched(done, 1)
            slots.state[done] = SlotState.DECODING
            rows = np.concatenate((rows, prefill_slots))
            kv_at_most = np.concatenate((kv_at_most, ends))
            if np.count_nonzero(slots.forces_routing[prefill_slots]):
                forced = _forced_routing(slots, chunks)
        mode = SamplingMode(int(slots.sampling_mode[rows].max(initial=SamplingMode.GREEDY)))
        features = _features_of(slots, rows, produces, chunks, mode)
        if forced is not None:
            features = replace(features, forced_routing=forced)
        plan = StepPlan(
            step=self.next_step,
            dims=shape.captured(self._graph_shapes)
            or shape.eager(
                width,
                decode.kv_at_most,
                tuple((end - start, end) for _, start, end in chunks),
            ),
            num_decode=num_decode,
            width=width,
            slots=rows,
            generations=slots.generation[rows],
            kv_at_most=kv_at_most,
            widths=widths,
            produces=produces,
            sampling_mode=mode,
            block_updates=self._take_updates(),
            prefill_starts=starts,
            prefill_token_ids=token_ids,
            prefill_features=step_features,
            prefill_following=following,
            features=features,
            states=states,
            short_of_blocks=short_of_blocks,
        )
        self.next_step += 1
        return plan

    def _take_updates(self) -> BlockUpdates:
        if not self._updates:
            return _NO_UPDATES
        columns = zip(*self._updates, strict=True)
        self._updates = []
        return BlockUpdates(*(np.concatenate(column) for column in columns))


def _forced_routing(slots: RequestSlots, chunks: list[PrefillChunk]) -> NDArray[np.int16]:
    """`PlanFeatures.forced_routing` of a step with such chunks."""
    given = [slots.request_at(slot).forced_routing for slot, _, _ in chunks]
    shape = next(each.shape[1:] for each in given if each is not None)
    found = np.full((sum(end - start for _, start, end in chunks), *shape), -1, np.int16)
    first = 0
    for each, (_, start, end) in zip(given, chunks, strict=True):
        if each is not None:
            rows = each[start:end]
            found[first : first + len(rows)] = rows
        first += end - start
    return found


def dummy_plan(dims: BatchDimensions) -> StepPlan:
    """A plan of a captured shape in which every row is a dummy row."""
    return StepPlan(
        step=0,
        dims=dims,
        num_decode=0,
        width=dims.width,
        slots=NO_SLOTS,
        generations=_NONE,
        kv_at_most=_NONE,
        widths=_NONE,
        produces=np.empty(0, dtype=np.bool_),
        sampling_mode=SamplingMode.GREEDY,
        block_updates=_NO_UPDATES,
        prefill_starts=_NO_STARTS,
        prefill_token_ids=_NONE,
        prefill_features=_NONE,
        prefill_following=_NONE,
        features=NO_FEATURES,
    )


def _features_of(
    slots: RequestSlots,
    rows: IntArray,
    produces: np.ndarray,
    chunks: list[PrefillChunk],
    mode: SamplingMode,
) -> PlanFeatures:
    """What the requests of a step's rows ask for. `rows` are their slots, the chunks' last;
    `produces` says whether a row's sample is a token of its request."""
    if mode != SamplingMode.PROCESSED:
        return NO_FEATURES
    features = slots.features[rows]
    spans: list[PromptSpan] = []
    place = 0
    for chunk, (slot, start, end) in enumerate(chunks):
        first = max(start, int(slots.prompt_log_probs_from[slot]))
        last = min(end, int(slots.prompt_log_probs[slot]))
        if first < last:
            own = OF_SCORES if slots.is_score(slot) else OF_PROMPTS
            at = place - start
            spans.append(PromptSpan(chunk, at + first, at + last, slots.features[slot] & own))
        place += end - start
    return PlanFeatures(
        wants_log_probs=bool(np.any(features & RowFeature.LOG_PROBS)),
        prompt_spans=tuple(spans),
        num_prompt_log_probs=sum(span.end - span.first for span in spans),
        constrained_rows=np.flatnonzero(((features & RowFeature.CONSTRAINED) != 0) & produces),
    )
