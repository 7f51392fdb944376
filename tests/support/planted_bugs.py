"""Bugs of the kinds that async engines have, planted one at a time to see that they are found."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import DynamicInferenceEngine, TextGenerationController
from megatron_async.device_state import gpu_view, unpack_step_reference
from megatron_async.device_state.bookkeeping_layout import COUNT
from megatron_async.engine.weight_books import WeightBooks
from megatron_async.ops.drafting.ngram_lookup import ngram_drafts
from megatron_async.ops.sampling.slot_records import Header, RowFeature
from megatron_async.planning import host_staging
from megatron_async.planning.host_staging import HostStaging
from megatron_async.planning.kv_block_allocator import KVBlockAllocator
from megatron_async.planning.prefix_cache import PrefixCache
from megatron_async.planning.request_slots import RequestSlots, SlotState
from megatron_async.planning.scheduler import Scheduler
from megatron_async.planning.step_plan import StepPlan
from megatron_async.requests.moved_request import MovedRequest
from megatron_async.requests.streaming import RequestStream, StreamChunk
from megatron_async.step import routing_recorder
from megatron_async.step.ngram_drafter import NgramDrafter
from megatron_async.step.routing_recorder import RoutingRecorder
from tests.support.planted_state_bugs import MTP_BUGS, RECURRENT_BUGS
from tests.support.poison import NOBODYS_EXPERT
from tests.support.staged_weights import StagedWeights, copy_weights

Plant = Callable[[pytest.MonkeyPatch], None]


def one_staging_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory changes while a copy from it is in flight."""
    make = HostStaging.__init__

    def make_of_one_buffer(staging: HostStaging, *args: Any) -> None:
        make(staging, *args)
        staging._tensors = staging._tensors[:1] * len(staging._tensors)
        staging._arrays = staging._arrays[:1] * len(staging._arrays)

    monkeypatch.setattr(HostStaging, "__init__", make_of_one_buffer)


def bookkeeping_thought_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host forgets that a step with prefill wrote over an entry of the device's ring, and does
    not copy a later decode step's rows."""
    pack = HostStaging.pack

    def pack_and_forget(staging: HostStaging, plan: StepPlan, slots: RequestSlots) -> Any:
        entry = plan.step % len(staging._on_device)
        before = staging._on_device[entry]
        words = pack(staging, plan, slots)
        if not plan.dims.is_decode_only:
            staging._on_device[entry] = before
        return words

    monkeypatch.setattr(HostStaging, "pack", pack_and_forget)


def one_sample_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that nobody has read are written over."""
    make = TextGenerationController.__init__

    def make_with_short_ring(controller: TextGenerationController, *args: Any) -> None:
        make(controller, *args)
        del controller._ring[1:]

    monkeypatch.setattr(TextGenerationController, "__init__", make_with_short_ring)


def no_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot changes hands without a trace, and rows in flight are booked to its next owner."""
    release = RequestSlots.release

    def release_without_trace(slots: RequestSlots, slot: int) -> Any:
        blocks = release(slots, slot)
        slots.generation[slot] -= 1
        return blocks

    monkeypatch.setattr(RequestSlots, "release", release_without_trace)


def one_block_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is evicted keeps its last block's place in the table of its slot: the next
    owner writes to a block that is free."""
    admit = Scheduler._admit

    def admit_with_a_stale_block(scheduler: Scheduler, micro_batch: int) -> int:
        waiting, slots = scheduler.waiting.first(), scheduler._slots
        slot = admit(scheduler, micro_batch)
        if waiting.generated_tokens and slots.num_blocks[slot] > 1:
            updates = scheduler._builder._updates
            last = slots.num_blocks[slot] - 1
            slot_ids, indices, blocks = updates[-1]
            updates[-1] = (slot_ids[:-1], indices[:-1], blocks[:-1])
            assert indices[-1] == last
        return slot

    monkeypatch.setattr(Scheduler, "_admit", admit_with_a_stale_block)


def last_token_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is evicted forgets its last token, and says it again."""
    evict = Scheduler._evict

    def evict_too_much(scheduler: Scheduler, slot: int) -> None:
        request = scheduler._slots.request_at(slot)
        evict(scheduler, slot)
        del request.generated_tokens[-1:]

    monkeypatch.setattr(Scheduler, "_evict", evict_too_much)


def serial_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort turns overlap off for the rest of the run."""
    abort = DynamicInferenceEngine.abort_request

    def abort_and_slow_down(engine: DynamicInferenceEngine, request_id: int) -> None:
        abort(engine, request_id)
        engine.loop.lookahead = 0

    monkeypatch.setattr(DynamicInferenceEngine, "abort_request", abort_and_slow_down)


def pending_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is resumed counts a sample that nobody has launched: it ends one token short
    and waits for a sample that never comes."""
    resume = Scheduler._resume

    def resume_and_count(scheduler: Scheduler, rows: Any) -> None:
        slots = scheduler._slots
        paused = rows[slots.state[rows] == 3]
        resume(scheduler, rows)
        slots.count_launched(paused, 1)

    monkeypatch.setattr(Scheduler, "_resume", resume_and_count)


def stale_sampling_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a slot's last owner stays."""
    pack_records = host_staging._pack_records

    def pack_for_the_first_owner(
        words: Any, end: int, fields: Any, plan: StepPlan, slots: RequestSlots
    ) -> int:
        end = pack_records(words, end, fields, plan, slots)
        chunks = plan.num_rows - plan.num_decode
        had_owner = plan.generations[plan.num_decode :] > 0
        fields["prefill_record"][:chunks][had_owner] = -1
        return end

    monkeypatch.setattr(host_staging, "_pack_records", pack_for_the_first_owner)


def a_reader_misses_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was booked in the step that ended a request is not streamed."""
    read = RequestStream.__anext__

    async def read_while_it_runs(stream: RequestStream) -> StreamChunk:
        chunk = await read(stream)
        return StreamChunk(chunk.tokens[:-1], chunk.text) if stream._is_over else chunk

    monkeypatch.setattr(RequestStream, "__anext__", read_while_it_runs)


def blocks_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are counted without the widths of rows: drafts go to blocks of others."""

    def places_of_rows_of_one(slots: RequestSlots, rows: Any, width: int) -> Any:
        return np.minimum(slots.at_most(rows), slots.max_length[rows] - 1)

    monkeypatch.setattr(RequestSlots, "places", places_of_rows_of_one)


def drafts_without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row under a grammar brings its drafts too, for which it has no blocks."""
    unpack = unpack_step_reference._unpack_decode_rows

    def unpack_all(fields: Any, dims: Any, slots: Any, size: int, out: Any, lengths: Any) -> None:
        constrained = (slots.records[:, Header.FEATURES] & int(RowFeature.CONSTRAINED)) != 0
        column = slots.records[:, Header.DRAFTS]
        kept = column.clone()
        column[constrained] = dims.width
        unpack(fields, dims, slots, size, out, lengths)
        column.copy_(kept)

    monkeypatch.setattr(unpack_step_reference, "_unpack_decode_rows", unpack_all)
    reference = unpack_step_reference.unpack_step_reference
    monkeypatch.setattr(gpu_view, "unpack_step_on_host", reference)


def drafts_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row yields its drafts whether they are what was sampled or not."""
    _feed_back_after(monkeypatch, believe=True)


def one_draft_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft that is wrong counts as right."""
    _feed_back_after(monkeypatch, believe=False)


def _feed_back_after(monkeypatch: pytest.MonkeyPatch, believe: bool) -> None:
    """Feed samples back as if all drafts, or one more than agree, were what was sampled."""
    feed_back = gpu_view.feed_back_on_host

    def feed_back_more(sampled: Any, step: Any, dims: Any, *rest: Any) -> None:
        if dims.width > 1:
            rows, width = dims.decode_rows, dims.width
            table = sampled[: rows * width].view(rows, width)
            drafts = step.token_ids[: rows * width].view(rows, width)[:, 1:]
            agrees = (drafts == table[:, :-1]).int().cumprod(dim=1)
            first_wrong = (agrees.cumsum(dim=1) == agrees.sum(dim=1, keepdim=True)) & (agrees == 0)
            first_wrong &= first_wrong.cumsum(dim=1) == 1
            table[:, :-1] = drafts.where(first_wrong | believe, table[:, :-1])
        feed_back(sampled, step, dims, *rest)

    monkeypatch.setattr(gpu_view, "feed_back_on_host", feed_back_more)


def length_of_the_last_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk of a prompt does not set its slot's length where the slot had an owner."""
    feed_back = gpu_view.feed_back_on_host

    def feed_back_without_lengths(
        sampled: Any, step: Any, dims: Any, words: Any, slots: Any, *rest: Any
    ) -> None:
        chunks = step.row_slots[dims.decode_rows :]
        before = slots.length[chunks].clone()
        feed_back(sampled, step, dims, words, slots, *rest)
        slots.length[chunks] = slots.length[chunks].where(before == 1, before)

    monkeypatch.setattr(gpu_view, "feed_back_on_host", feed_back_without_lengths)


def surplus_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is paused gives back the block that its newest keys and values are in."""
    give_back = Scheduler._give_surplus_back

    def give_too_much_back(scheduler: Scheduler, slot: int) -> None:
        give_back(scheduler, slot)
        slots = scheduler._slots
        if slots.num_blocks[slot] > 1:
            last = slots.blocks_of(slot)[-1:].copy()
            slots.num_blocks[slot] -= 1
            scheduler._blocks.release(last)

    monkeypatch.setattr(Scheduler, "_give_surplus_back", give_too_much_back)


def starts_at_zero_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first chunk that begins after shared blocks leaves its slot as the last owner left it."""
    acquire = RequestSlots.acquire

    def acquire_as_if_begun(slots: RequestSlots, *args: Any, num_shared: int = 0) -> int:
        slot = acquire(slots, *args, num_shared=num_shared)
        slots.num_cached[slot] = 0
        return slot

    monkeypatch.setattr(RequestSlots, "acquire", acquire_as_if_begun)


def shared_blocks_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that is computed again is written to the shared block that it ends."""
    acquire = RequestSlots.acquire

    def acquire_as_if_alone(slots: RequestSlots, *args: Any, num_shared: int = 0) -> int:
        slot = acquire(slots, *args, num_shared=num_shared)
        slots.num_shared[slot] = slots.num_cached[slot]
        return slot

    monkeypatch.setattr(RequestSlots, "acquire", acquire_as_if_alone)


def repeated_tokens_read_the_dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is computed again reads its keys where it writes them."""

    def read(out: Any, row: int, token: int, size: int) -> None:
        last = (out.kv_lengths[row] - 1) // size
        out.block_tables[row, last] = out.write_index[token] // size

    _change_repeated(monkeypatch, read)


def repeated_tokens_one_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is computed again stands at the position after its own."""

    def move(out: Any, row: int, token: int, size: int) -> None:
        out.positions[token] += 1

    _change_repeated(monkeypatch, move)


def _change_repeated(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, int, int, int], None]
) -> None:
    unpack = unpack_step_reference._unpack_chunks

    def unpack_and_change(fields: Any, dims: Any, slots: Any, size: int, out: Any) -> None:
        unpack(fields, dims, slots, size, out)
        repeats = fields["prefill_features"] & RowFeature.REPEATS
        for chunk in repeats.nonzero()[:, 0].tolist():
            change(out, dims.decode_rows + chunk, int(out.prefill_starts[chunk]), size)

    monkeypatch.setattr(unpack_step_reference, "_unpack_chunks", unpack_and_change)


def shared_blocks_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is handed out again when the first of its owners is gone."""
    release = KVBlockAllocator.release

    def release_for_all(blocks: KVBlockAllocator, given: Any) -> None:
        shared = given[blocks.owners[given] > 1]
        release(blocks, given)
        blocks._push(shared)

    monkeypatch.setattr(KVBlockAllocator, "release", release_for_all)


def blocks_entered_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of generated tokens is found before a step feeds the last of them."""

    def all_that_is_known(cache: PrefixCache, slots: Any) -> Any:
        return cache._slots.num_known[slots] // cache._size

    monkeypatch.setattr(PrefixCache, "_held", all_that_is_known)


def lost_blocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block can be found under the tokens that it held for its last owner."""
    monkeypatch.setattr(PrefixCache, "_take_notice", lambda cache: None)


def drafts_of_the_last_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are looked up in the blocks that the slot's first owner had."""
    propose = NgramDrafter.propose

    def propose_from_old_blocks(drafter: NgramDrafter, view: Any, count: int) -> Any:
        kept = view.__dict__.setdefault("old_tables", {})
        tables = view.step.block_tables
        for row, slot in enumerate(view.step.row_slots.tolist()):
            first = kept.setdefault(slot, (view.slots.records[slot].clone(), tables[row].clone()))
            if not torch.equal(first[0], view.slots.records[slot]):
                tables[row] = first[1]
        return propose(drafter, view, count)

    monkeypatch.setattr(NgramDrafter, "propose", propose_from_old_blocks)


def a_match_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens match themselves."""
    look_up = ngram_drafts.reference

    def look_up_one_further(
        block_tokens: Any, tables: Any, slots: Any, lengths: Any, *rest: Any
    ) -> Any:
        drafts = look_up(block_tokens, tables, slots, lengths, *rest)
        last = rest[0][slots][:, None].expand_as(drafts)
        is_long = (lengths[slots] > 2)[:, None] & (drafts >= 0)
        return last.where(is_long, drafts)

    monkeypatch.setattr(ngram_drafts, "on", lambda *_: look_up_one_further)


def one_token_less_at_a_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose drafts reach a new block counts one of its tokens too few."""
    feed_back = gpu_view.ContextGPUView.feed_back

    def feed_back_less(view: gpu_view.ContextGPUView, sampled: Any) -> None:
        feed_back(view, sampled)
        rows = view.dims.decode_rows
        found, owners = view.sample_ring[int(view.step.entry), :rows], view.step.row_slots[:rows]
        at_border = view.slots.length[owners] % view.config.block_size_tokens == 1
        less = (at_border & (found[:, COUNT] > 1)).int()
        found[:, COUNT] -= less
        view.slots.length[owners] -= less

    monkeypatch.setattr(gpu_view.ContextGPUView, "feed_back", feed_back_less)


def routing_of_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record keeps the experts of the first token that stood at a place: of a draft, though it
    was rejected."""
    store = RoutingRecorder.store

    def store_once(recorder: RoutingRecorder, view: gpu_view.ContextGPUView) -> None:
        record = view.kv_cache.block_routing.flatten(0, 1)
        before = record.clone()
        store(recorder, view)
        if view.dims.width > 1:
            is_written = (before != NOBODYS_EXPERT).all(2).all(1)
            record[is_written] = before[is_written]

    monkeypatch.setattr(RoutingRecorder, "store", store_once)


def routing_of_another_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows of a record are those of the block that the slot's last owner began with."""
    gather, first = routing_recorder._gather, dict[int, torch.Tensor]()

    def gather_for_the_last_owner(kept: Any, table: Any) -> Any:
        last = first.get(table.data_ptr(), table[:1])
        first[table.data_ptr()] = table[:1].clone()
        return gather(kept, torch.cat((last, table[1:])))

    monkeypatch.setattr(routing_recorder, "_gather", gather_for_the_last_owner)


def routing_is_gathered_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are read on the copy stream, when later steps may have written them."""
    gather, send = routing_recorder._gather, routing_recorder._send
    monkeypatch.setattr(routing_recorder, "_gather", lambda kept, table: (kept, table))
    monkeypatch.setattr(routing_recorder, "_send", lambda blocks, host: send(gather(*blocks), host))


def a_version_one_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of new weights is said to be the old ones'."""
    pass_border = WeightBooks.pass_border

    def pass_the_step_before(books: WeightBooks, step: int) -> None:
        pass_border(books, step - 1)

    monkeypatch.setattr(WeightBooks, "pass_border", pass_the_step_before)


def hits_across_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """New weights find blocks and states of old ones."""
    monkeypatch.setattr(PrefixCache, "reset", lambda cache: None)


def weights_change_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are made when they are enqueued: steps in flight run with the new weights."""

    def commit(stage: StagedWeights) -> bool:
        copy_weights(stage._wrapper.model, stage._source)
        return False

    monkeypatch.setattr(StagedWeights, "commit", commit)


def half_a_prompt_of_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is under way goes on."""
    evict = Scheduler.evict

    def evict_who_decodes(scheduler: Scheduler, which: Any) -> None:
        evict(scheduler, which & (scheduler._slots.state != SlotState.PREFILLING))

    monkeypatch.setattr(Scheduler, "evict", evict_who_decodes)


def moved_one_place_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that moves has its last token twice, and each further one at the next position."""
    _restore_otherwise(
        monkeypatch, lambda request: request.generated_tokens[-1:], lambda spans: spans
    )


def a_span_that_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first version of a request's tokens moves, and no further one."""
    _restore_otherwise(monkeypatch, lambda request: [], lambda spans: spans[:1])


def _restore_otherwise(monkeypatch: pytest.MonkeyPatch, more: Any, kept: Any) -> None:
    restore = MovedRequest.restore

    def restore_and_change(moved: MovedRequest, request: Any, *arguments: Any) -> None:
        restore(moved, request, *arguments)
        request.generated_tokens += more(request)
        request.weights.tokens = kept(request.weights.tokens)

    monkeypatch.setattr(MovedRequest, "restore", restore_and_change)


MOVE_BUGS: list[Plant] = [moved_one_place_on, a_span_that_is_left_behind]
"""Bugs of requests that move."""
UPDATE_BUGS: list[Plant] = [
    a_version_one_step_late,
    hits_across_epochs,
    weights_change_at_once,
    half_a_prompt_of_old_weights,
]
"""Bugs of changing weights."""
BUGS: list[Plant] = [
    one_staging_buffer,
    bookkeeping_thought_there,
    one_sample_buffer,
    no_generations,
    one_block_too_few,
    last_token_twice,
    serial_after_an_abort,
    pending_for_ever,
    stale_sampling_parameters,
    a_reader_misses_the_end,
    blocks_for_one_token,
    drafts_without_blocks,
    drafts_believed,
    one_draft_too_many,
    length_of_the_last_owner,
    surplus_and_one_more,
    starts_at_zero_alone,
    shared_blocks_are_freed,
    shared_blocks_are_written,
    repeated_tokens_read_the_dummy,
    repeated_tokens_one_further,
    blocks_entered_too_early,
    lost_blocks_are_found,
    drafts_of_the_last_owner,
    a_match_with_itself,
    one_token_less_at_a_border,
    routing_of_rejected_drafts,
    routing_of_another_writer,
    routing_is_gathered_too_late,
    *MTP_BUGS,
    *RECURRENT_BUGS,
]
