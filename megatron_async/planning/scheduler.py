"""`Scheduler`: which requests run in the next step, get blocks, or are paused or evicted when no
block is free."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron_async.config import InferenceConfig
from megatron_async.observe.tracer import Tracer
from megatron_async.planning.admission import AdmissionQueue
from megatron_async.planning.draft_books import DraftBooks
from megatron_async.planning.kv_block_allocator import KVBlockAllocator
from megatron_async.planning.micro_batches import MicroBatches
from megatron_async.planning.plan_builder import PlanBuilder, PrefillChunk
from megatron_async.planning.prefix_cache import NOTHING, Found, PrefixCache
from megatron_async.planning.request_slots import (
    ALL,
    NO_DECODE,
    NO_SLOTS,
    DecodeRows,
    RequestSlots,
    SlotState,
)
from megatron_async.planning.step_plan import IntArray
from megatron_async.planning.window_tables import WindowTables
from megatron_async.requests.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)
from megatron_async.requests.weight_versions import Version

ADMISSION_HORIZON = 32
"""Admission leaves free the blocks that running requests will need within this many steps, so that
a new request does not cause the pause of running ones right away."""


class Scheduler:
    """Schedules steps on the CPU, without waiting for any step in flight.

    Args:
        config: settings of the engine.
        slots: per-request state.
        blocks: ownership of KV blocks.
        builder: takes the block-table updates of the step that is scheduled.
        tracer: records the time of scheduling as a named range.
        max_paused_blocks: blocks that paused requests may hold.
        chunk_border: a prefill chunk that is not its prompt's last ends at a multiple of this
            position, if the step's budget reaches one. Then the result of a recurrent layer's scan
            does not depend on the schedule.
        prefix_cache: finds cached blocks for new requests; None: no blocks are shared.
        drafts: choose the width of decode rows; None: it is 1.

    Attributes:
        waiting: requests without a slot.
        prefilling: slots whose prompt is not wholly in the cache, in order of admission.
        micro_batches: which of the requests the next step serves.
        prefill_limit: prompt tokens that a step with decode rows may have, beside its budget.
        weight_version: of the weights that the next plan's step runs with.
        pauses, evictions: counts of events so far.
        recomputed_tokens: tokens that evictions took from the cache and that are prefilled again.
        before_release: called with a request that is about to lose its slot, the slot, and how many
            of its positions are computed by steps that are launched; None: nobody asks.
    """

    def __init__(
        self,
        config: InferenceConfig,
        slots: RequestSlots,
        blocks: KVBlockAllocator,
        builder: PlanBuilder,
        tracer: Tracer,
        max_paused_blocks: int,
        chunk_border: int = 1,
        prefix_cache: PrefixCache | None = None,
        drafts: DraftBooks | None = None,
    ) -> None:
        self._config = config
        self._slots = slots
        # Steps that may be taken back feed tokens from the known ones on.
        self._least = slots.num_known if config.invalidation == "rollback" else None
        self._blocks = blocks
        self._builder = builder
        self._tracer = tracer
        self._max_paused_blocks = max_paused_blocks
        self._chunk_border = chunk_border
        self.prefix_cache = prefix_cache
        self._drafts = drafts
        self.waiting = AdmissionQueue()
        self.prefilling: list[int] = []
        self.micro_batches = MicroBatches(slots, config.steps_in_flight - 1)
        self.prefill_limit = config.max_tokens
        self.weight_version: Version = None
        self._stuck: list[int] = []
        """Prompts under way for which there are no blocks in tables of windows."""
        self.pauses = 0
        self.evictions = 0
        self.recomputed_tokens = 0
        self.before_release: Callable[[DynamicInferenceRequest, int, int], None] | None = None

    def release(self, slot: int) -> None:
        """Take slot and blocks from a request; its generated tokens stay with it."""
        slots = self._slots
        if self.prefix_cache is not None:
            self.prefix_cache.leaves(slot, self._builder.next_step)
        slots.request_at(slot).generated_tokens = slots.generated_tokens(slot)
        self.keep_routing(slot)
        if slots.state[slot] == SlotState.PREFILLING:
            self.prefilling.remove(slot)
        self._builder.drop_block_updates(slot)
        self._blocks.release(slots.release(slot))

    def keep_routing(self, slot: int) -> None:
        """Have the routing record of the request in `slot` copied, if it has one."""
        if self.before_release is not None and (request := self._slots.requests[slot]) is not None:
            # Of its tokens the last one is fed by a step that is not booked, or never.
            computed = min(self._slots.num_computed(slot), int(self._slots.num_known[slot]) - 1)
            self.before_release(request, slot, computed)

    def schedule(self) -> tuple[DecodeRows, list[PrefillChunk]]:
        """Decode rows and prefill chunks of the next step; both empty if nothing can run."""
        while True:
            self._stuck = []
            for micro_batch in self.micro_batches.in_turn():
                with self._tracer.range("schedule", self._builder.next_step):
                    decode = self._schedule_decode(micro_batch)
                    budget = self._config.max_tokens - len(decode.slots) * decode.width
                    if len(decode.slots):
                        budget = min(budget, self.prefill_limit)
                    prefill = self._schedule_prefill(micro_batch, budget)
                if len(decode.slots) or prefill:
                    self.micro_batches.took(micro_batch, feeds_back=len(decode.slots) > 0)
                    return decode, prefill
            if not self._make_room():
                return NO_DECODE, []

    def forget_prefilled(self) -> None:
        """A plan was built: remove slots from `prefilling` whose prompts the plan completes."""
        is_under_way = self._slots.state == SlotState.PREFILLING
        self.prefilling = [slot for slot in self.prefilling if is_under_way[slot]]

    # ---- Decode ------------------------------------------------------------------------------

    def _schedule_decode(self, micro_batch: int) -> DecodeRows:
        """The rows of a micro-batch that decode this step, each with blocks for its query tokens.

        When blocks run out, rows run without drafts. If blocks are still too few, the requests
        first in rank get them. Of the others, those whose length is known are paused; the rest
        wait until the steps in flight have shown their length.
        """
        slots, blocks = self._slots, self._blocks
        if slots.windows is not None:
            self._leave_behind(slots.windows)
        # All slots at once: cheaper than to pick some out of each array.
        wants = slots.may_decode()
        # Under a grammar the mask of a token needs the token before it: one may be in flight.
        wants &= slots.in_flight_steps < slots.most_in_flight
        wants = self.micro_batches.members(wants, micro_batch)
        width = 1 if self._drafts is None else self._drafts.width_for(wants)
        short_of_blocks = False
        places = slots.places(ALL, width)
        needy, wanted, count = self._in_need(wants, places)
        if width > 1 and count > blocks.allocatable:
            width, short_of_blocks = 1, True
            places = slots.places(ALL, width)
            needy, wanted, count = self._in_need(wants, places)
        if count > 0:
            starved = NO_SLOTS
            if count > blocks.allocatable:
                by_rank = np.argsort(slots.rank[needy])
                needy, wanted = needy[by_rank], wanted[by_rank]
                fed = int(np.searchsorted(wanted.cumsum(), blocks.allocatable, side="right"))
                starved, needy, wanted = needy[fed:], needy[:fed], wanted[:fed]
                count = int(wanted.sum())
                wants[starved] = False
            self._resume(needy)
            if len(starved):
                is_exact = slots.in_flight_tokens[starved] == slots.in_flight_steps[starved]
                self._pause(starved[is_exact])
            self._give_blocks(needy, wanted, count)
        rows = wants.nonzero()[0]  # sync-ok: NumPy; `flatnonzero` takes a microsecond more
        if not len(rows):
            return NO_DECODE
        return DecodeRows(rows, width, places[rows], short_of_blocks)

    def _in_need(
        self, wants: NDArray[np.bool_], places: IntArray
    ) -> tuple[IntArray, IntArray, int]:
        """Slots of those that want to run, bool `[slots]`, that lack blocks for their places, how
        many each lacks in all its tables, and the sum."""
        size = self._config.block_size_tokens
        missing = self._slots.with_drafts(places) - self._slots.num_blocks * size
        is_needy = missing > 0
        is_needy &= wants
        if not np.count_nonzero(is_needy):
            return NO_SLOTS, NO_SLOTS, 0
        needy = np.flatnonzero(is_needy)
        wanted = -(-missing[needy] // size)
        if self._slots.num_tables > 1:
            wanted *= self._slots.num_tables
        return needy, wanted, int(wanted.sum())

    def _give_blocks(self, rows: IntArray, counts: IntArray, count: int) -> None:
        """Give each of `rows` its number of blocks, as many in each table, `count` in all."""
        slots, tables = self._slots, self._slots.num_tables
        places = indices = slots.num_blocks[rows]
        blocks = self._blocks.allocate(count)
        if count > len(rows):
            within = np.arange(len(blocks)) - np.repeat(counts.cumsum() - counts, counts)
            indices = (np.repeat(indices, counts) + within // tables).astype(np.int32)
            places = indices + np.int32(slots.columns) * (within % tables).astype(np.int32)
            rows = np.repeat(rows, counts)
        slots.block_table[rows, places] = blocks
        slots.num_blocks[rows] = indices + 1
        if slots.windows is not None:
            slots.windows.end[rows] = indices + 1
        self._builder.add_block_updates(rows, places, blocks)

    def _leave_behind(self, windows: WindowTables) -> None:
        """Take from decoding requests the blocks that no query to come sees."""
        slots = self._slots
        queries = (slots.at_least(ALL) if self._least is None else self._least) - 1
        passed = windows.passed(queries)
        passed &= slots.state >= SlotState.DECODING
        for slot in np.flatnonzero(passed):
            self._pass_by(windows, int(slot), int(queries[slot]))

    def _pass_by(self, windows: WindowTables, slot: int, queries: int) -> None:
        row = self._slots.block_table[slot]
        for span in windows.pass_by(slot, queries):
            self._blocks.release(row[span].copy())

    # ---- Prefill -----------------------------------------------------------------------------

    def _schedule_prefill(self, micro_batch: int, budget: int) -> list[PrefillChunk]:
        """Prefill chunks for at most `budget` tokens of a micro-batch: prompts under way first,
        then new requests."""
        chunks: list[PrefillChunk] = []
        for slot in self.prefilling:
            if slot % self._slots.num_micro_batches == micro_batch:
                budget -= self._add_chunk(chunks, slot, budget)
        while budget > 0 and self._may_admit(micro_batch, budget):
            budget -= self._add_chunk(chunks, self._admit(micro_batch), budget)
        return chunks

    def _add_chunk(self, chunks: list[PrefillChunk], slot: int, budget: int) -> int:
        start = int(self._slots.num_prefilled[slot])
        known = self._slots.num_to_prefill(slot)
        end = min(known, start + budget)
        if self._slots.windows is not None:
            end = self._end_in_windows(self._slots.windows, slot, start, end)
        border = end // self._chunk_border * self._chunk_border
        if end < known and border > start:
            end = border
        if end > start:
            if self._slots.windows is not None:
                self._fill_windows(self._slots.windows, slot, end)
            chunks.append(PrefillChunk(slot, start, end))
            if self.prefix_cache is not None:
                self.prefix_cache.written(slot, start, end, self._builder.next_step)
        elif budget > 0:
            self._stuck.append(slot)
        return max(end - start, 0)

    def _end_in_windows(self, windows: WindowTables, slot: int, start: int, end: int) -> int:
        """Where a chunk ends for which there are blocks in the tables of windows, `end` or before;
        `start`: there are none."""
        self._pass_by(windows, slot, start)
        known, size = self._slots.num_to_prefill(slot), self._config.block_size_tokens
        held = int(windows.end[slot]) + self._blocks.allocatable // windows.per_block
        if end == known and held < self._slots.num_blocks[slot]:
            end -= 1  # the last token of a prompt comes with the blocks of drafts
        return max(min(end, held * size), start)

    def _fill_windows(self, windows: WindowTables, slot: int, end: int) -> None:
        """Give the tables of windows blocks for the tokens up to `end`; with a prompt's last, as
        many as full layers have."""
        slots, is_last = self._slots, end == self._slots.num_to_prefill(slot)
        wanted = slots.num_blocks[slot] if is_last else -(-end // self._config.block_size_tokens)
        if (more := int(wanted - windows.end[slot])) > 0:
            indices = windows.more(slot, more)
            blocks = self._blocks.allocate(len(indices))
            slots.block_table[slot, indices] = blocks
            owners = np.full(len(indices), slot, np.int64)
            self._builder.add_block_updates(owners, indices.astype(np.int32), blocks)

    def _may_admit(self, micro_batch: int, budget: int) -> bool:
        slots, config, queue = self._slots, self._config, len(self.waiting)
        if not queue or self._stuck or not self.micro_batches.may_admit(micro_batch, queue):
            return False
        if np.any(slots.state == SlotState.PAUSED):
            return False
        waiting = self.waiting.first()
        if budget < waiting.num_known <= config.max_tokens and not config.enable_chunked_prefill:
            return False
        size = config.block_size_tokens
        count = self._blocks_for(waiting)
        wanted = slots.needs.full * count
        if self._builder.num_updates + wanted > self._blocks.total:
            return False  # shared blocks stand in several tables: the next step has room for them
        found = self._look_up(waiting)
        if found.is_being_written or not self._has_row(found):
            return False
        horizon = ADMISSION_HORIZON * slots.max_width
        soon = slots.num_known + slots.in_flight_tokens + horizon > slots.num_blocks * size
        reserve = int(np.count_nonzero((slots.state == SlotState.DECODING) & soon))
        if slots.windows is not None:
            reserve = slots.num_tables * reserve + self._wanted_by_prefills(slots.windows)
            wanted += len(found.blocks) - slots.needs.full * found.length
            updates = wanted + slots.needs.of_windows(count - found.length, budget)
            if 0 < self._builder.num_updates > self._blocks.total - updates:
                return False
            more = slots.needs.of_windows(count - found.length, config.max_tokens)
            wanted += min(more, self._blocks.total - wanted)
        # A cached block that nobody owns is taken from the allocatable ones like a fresh one.
        wanted -= int(np.count_nonzero(self._blocks.owners[found.blocks]))
        return wanted + reserve <= self._blocks.allocatable

    def _wanted_by_prefills(self, windows: WindowTables) -> int:
        """Blocks that prompts under way lack for the largest chunks."""
        needs, slots, lacking = self._slots.needs, self._slots, 0
        for slot in self.prefilling:
            held = sum(span.stop - span.start for span in windows.spans(slot))
            whole = needs.of_windows(int(slots.num_blocks[slot]), self._config.max_tokens)
            lacking += max(whole - held, 0)
        return lacking

    def _blocks_for(self, request: DynamicInferenceRequest) -> int:
        """Blocks of a request's known tokens, and of the drafts behind them."""
        places = min(request.num_known + self._slots.draft_places, request.max_length - 1)
        return -(-places // self._config.block_size_tokens)

    def _look_up(self, request: DynamicInferenceRequest) -> Found:
        """What is kept of a request's beginning."""
        if self.prefix_cache is None:
            return NOTHING
        step = self._builder.next_step
        return self.prefix_cache.look_up(request, request.num_known, step)

    def _has_row(self, found: Found) -> bool:
        """Whether there is a row for the state of a request that was found this much."""
        cache = self.prefix_cache
        return cache is None or cache.has_row(found, self._builder.next_step)

    def _admit(self, micro_batch: int) -> int:
        """Give the first waiting request a slot and the blocks of all its tokens."""
        request, slots, size = self.waiting.first(), self._slots, self._config.block_size_tokens
        count, found = self._blocks_for(request), self._look_up(request)
        shared, full = found.length, slots.needs.full
        slot = slots.acquire(
            request, request.rank, request.max_length, micro_batch, num_shared=shared * size
        )
        self.prefilling.append(slot)
        if self.prefix_cache is not None:
            self.prefix_cache.begin(slot, found, self._builder.next_step)
        # Shared before fresh ones are taken, which could be cached ones too.
        self._blocks.share(found.blocks)
        slots.num_blocks[slot] = count
        if slots.windows is not None:
            slots.windows.begin(slot, shared, int(slots.num_cached[slot]))
        fresh, cached = self._blocks.allocate(full * (count - shared)), found.blocks
        for span in slots.spans_of(slot):
            place = span.start % slots.columns
            have = max(min(shared, place + span.stop - span.start) - place, 0)
            lack = span.stop - span.start - have
            given = np.concatenate((cached[:have], fresh[:lack]))
            slots.block_table[slot, span], cached, fresh = given, cached[have:], fresh[lack:]
        spans = [np.arange(each.start, each.stop) for each in slots.spans_of(slot)]
        indices, blocks = np.concatenate(spans).astype(np.int32), slots.blocks_of(slot).copy()
        self._builder.add_block_updates(np.full(len(blocks), slot, np.int64), indices, blocks)
        request.add_event(DynamicInferenceEventType.ADD_CONTEXT)
        self.waiting.pop()
        if self.prefix_cache is not None:
            self.prefix_cache.count(request, found)
        tokens = int(slots.num_cached[slot])
        if request.num_cached_tokens is None:
            request.num_cached_tokens = tokens
        self.recomputed_tokens += max(request.num_computed - tokens, 0)
        request.weights.admit(self.weight_version)
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS
        return slot

    # ---- Memory pressure ---------------------------------------------------------------------

    def _pause(self, starved: IntArray) -> None:
        """Pause requests without a block in this step; they keep slot and blocks, up to the
        limit for paused requests. `starved` is in order of rank."""
        slots = self._slots
        newly = starved[slots.state[starved] != SlotState.PAUSED]
        slots.state[newly] = SlotState.PAUSED
        self.pauses += len(newly)
        for slot in newly:
            request = slots.request_at(slot)
            request.status = Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
            request.add_event(DynamicInferenceEventType.PAUSE)
            self._give_surplus_back(slot)
        first = slots.rank[slots.state != SlotState.FREE].min()
        for slot in starved[::-1]:
            # The first in rank is never evicted, so that it runs on to its end. Otherwise requests
            # could evict each other in turn, each time before a sample of theirs is booked.
            if slots.rank[slot] == first or self._held_by_paused() <= self._max_paused_blocks:
                break
            self._evict(slot)

    def _held_by_paused(self) -> int:
        """Blocks that paused requests hold, each counted once."""
        slots = self._slots
        paused = np.flatnonzero(slots.state == SlotState.PAUSED)
        return self._blocks.count_held([slots.blocks_of(slot) for slot in paused])

    def _give_surplus_back(self, slot: int) -> None:
        """Release blocks of a request that were reserved for tokens which it did not yield."""
        slots = self._slots
        # Steps in flight write no further than their last token but one; where a draft model has
        # entries of its own, the last token's is there already, and is not made again.
        last = int(slots.at_most(slot)) - (0 if slots.draft_places else 1)
        keep = -(-min(last, int(slots.max_length[slot]) - 1) // self._config.block_size_tokens)
        for span in slots.spans_of(int(slot)):
            first = span.start // slots.columns * slots.columns + keep
            self._blocks.release(slots.block_table[slot, max(first, span.start) : span.stop].copy())
        slots.num_blocks[slot] = min(keep, slots.num_blocks[slot])
        if slots.windows is not None:
            slots.windows.end[slot] = slots.num_blocks[slot]

    def _resume(self, rows: IntArray) -> None:
        """Continue requests that get a block; `rows` may contain running ones too."""
        slots = self._slots
        paused = rows[slots.state[rows] == SlotState.PAUSED]
        slots.state[paused] = SlotState.DECODING
        for slot in paused:
            slots.request_at(slot).status = Status.ACTIVE_AND_GENERATING_TOKENS

    def _make_room(self) -> bool:
        """Nothing can run: evict the paused request last in rank if the first one lacks blocks.

        Returns:
            whether to plan again.
        """
        state = self._slots.state
        if not np.any(state == SlotState.PAUSED) and len(self._stuck) < 2:
            return False
        if np.any(state == SlotState.DECODING):
            # At their length limits, or of unknown lengths, with tokens in flight: the next resolve
            # brings blocks, which is sooner than a prefill from the start.
            return False
        is_paused = state == SlotState.PAUSED
        needy, wanted, _ = self._in_need(is_paused, self._slots.places(ALL, 1))
        # The first in rank goes on before the others, and each of them lacks blocks.
        if len(needy) == np.count_nonzero(is_paused):
            ranks = self._slots.rank[needy]
            if not len(needy) or self._blocks.allocatable < wanted[np.argmin(ranks)]:
                lacking = np.array([*needy, *self._stuck])
                self._evict(int(lacking[np.argmax(self._slots.rank[lacking])]))
        return True

    def _evict(self, slot: int) -> None:
        """Take everything from a request, and queue it again.

        Samples of it in flight become zombies; they will be sampled again, to the same tokens.
        """
        self._slots.request_at(slot).add_event(DynamicInferenceEventType.EVICT)
        self.evictions += 1
        self.requeue(slot)

    def evict_all(self) -> None:
        """Evict every request that holds a slot."""
        self.evict(self._slots.state != SlotState.FREE)

    def evict(self, which: NDArray[np.bool_]) -> None:
        """Evict the requests in these slots, bool `[slots]`."""
        for slot in np.flatnonzero(which):
            self._evict(int(slot))

    def requeue(self, slot: int) -> None:
        """Take everything from a request; it waits again at its place by rank."""
        slots, request = self._slots, self._slots.request_at(slot)
        request.num_computed = slots.num_computed(slot)
        self.release(slot)
        self.waiting.add(request)
        request.status = Status.WAITING_IN_QUEUE
