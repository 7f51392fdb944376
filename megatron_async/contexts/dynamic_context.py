"""`DynamicInferenceContext`: the CPU's truth about requests, slots and KV blocks, and its plans.

`context.foo` is always CPU; `context.gpu_view.foo` is always device. The context launches nothing
on the device except the one copy of a step's bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_async.config import InferenceConfig
from megatron_async.contexts.admission import AdmissionQueue, WaitingRequest, rank_of
from megatron_async.contexts.batch_dimensions import BatchDimensions
from megatron_async.contexts.bookkeeping_buffer import HostStaging
from megatron_async.contexts.device_memory import make_gpu_view, max_paused_blocks
from megatron_async.contexts.graph_shapes import make_graph_shapes
from megatron_async.contexts.integrity import check_integrity
from megatron_async.contexts.kv_block_allocator import KVBlockAllocator
from megatron_async.contexts.micro_batches import MicroBatches
from megatron_async.contexts.plan_builder import PlanBuilder, PrefillChunk, dummy_plan
from megatron_async.contexts.plan_rollback import take_back
from megatron_async.contexts.request_slots import RequestSlots, SlotState
from megatron_async.contexts.step_output import StepOutput, book_samples
from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.contexts.step_shape import StepShape
from megatron_async.devices import Device, make_device, makes_ordinary_tensors
from megatron_async.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)
from megatron_async.profiling.timeline import Timeline
from megatron_async.profiling.tracer import Tracer

ADMISSION_HORIZON = 32
"""Admission leaves the blocks that running requests will want within this many steps, so that a
newcomer does not pause the requests it joins right away."""
NO_SLOTS = np.empty(0, dtype=np.int32)


def _alone(step: int, wanted: StepShape, has_work: bool) -> StepShape:
    return wanted


class DynamicInferenceContext:
    """Schedules requests over a paged KV cache.

    Args:
        model_config: Megatron's `TransformerConfig` of the model; a `HybridModel`'s must carry
            `hybrid_layer_pattern` (see `models.hybrid.ModelConfig`).
        inference_config: settings of the engine.
        device: the device to run on; made from `inference_config.device` when None.
        timeline: where the named ranges of this context, its controller and its engine are kept,
            or None.

    Attributes:
        gpu_view: the device's snapshot of the running step.
        slots: per-request state.
        blocks: ownership of KV blocks.
        waiting: requests without a slot.
        micro_batches: which of the requests the next step serves.
        graph_shapes: padded shapes that have, or will have, a captured graph.
        agree: from a step's number, the shape that this rank wants for it, and whether it has
            unfinished requests, to the shape in which all ranks launch it; at first it is alone.
        pauses, evictions: counts of events so far.
        recomputed_tokens: tokens that evictions took from the cache and that are prefilled again.
    """

    @makes_ordinary_tensors
    def __init__(
        self,
        model_config: Any,
        inference_config: InferenceConfig,
        device: Device | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.config = inference_config
        self.model_config = model_config
        self.device = device or make_device(inference_config.device)
        self.tracer = Tracer(self.device, timeline)
        self.block_size_tokens = inference_config.block_size_tokens
        self.max_requests = inference_config.max_requests
        self.max_tokens = inference_config.max_tokens
        self.max_sequence_length = inference_config.max_sequence_length

        self.gpu_view = make_gpu_view(model_config, inference_config, self.device)
        dummy_block = self.gpu_view.kv_cache.dummy_block
        self.blocks = KVBlockAllocator(dummy_block)
        self._max_paused_blocks = max_paused_blocks(
            model_config, inference_config, self.blocks.total, self.device
        )
        max_blocks = -(-self.max_sequence_length // self.block_size_tokens)
        stages = getattr(model_config, "pipeline_model_parallel_size", 1)
        self.slots = RequestSlots(self.max_requests, self.max_sequence_length, max_blocks, stages)
        self.micro_batches = MicroBatches(self.slots, inference_config.steps_in_flight - 1)
        self.waiting = AdmissionQueue()
        self._staging = HostStaging(
            self.device,
            self.gpu_view.bookkeeping.size(1),
            inference_config.steps_in_flight,
            self.max_requests,
        )
        self._arrived = [self.device.event() for _ in range(inference_config.steps_in_flight)]
        self.graph_shapes = make_graph_shapes(
            replace(inference_config, max_requests=-(-self.max_requests // stages)),
            self.device.captures_graphs,
            self.gpu_view.captures_prefill,
        )
        self._plan_builder = PlanBuilder(self.slots, self.graph_shapes)
        self._prefilling: list[int] = []
        self.agree: Callable[[int, StepShape, bool], StepShape] = _alone
        self._arrivals = 0
        self.pauses = 0
        self.evictions = 0
        self.recomputed_tokens = 0

    # ---- Requests in and out -----------------------------------------------------------------

    def add_request(self, request: DynamicInferenceRequest, seed: int, max_length: int) -> None:
        """Queue a request that the engine has found servable.

        Args:
            request: with its prompt tokens.
            seed: of its random numbers, 0 .. 2**63 - 1.
            max_length: sequence length, tokens, at which it ends.
        """
        rank = rank_of(self._arrivals, request.priority)
        self.waiting.add(WaitingRequest(request, rank, seed, max_length))
        self._arrivals += 1

    def release_request(self, slot: int) -> None:
        """End the request in `slot`: its blocks and slot are free at once (rows in flight become
        zombies), its generated tokens stay with the request."""
        request = self.slots.request_at(slot)
        request.generated_tokens = self.slots.generated_tokens(slot)
        if self.slots.state[slot] == SlotState.PREFILLING:
            self._prefilling.remove(slot)
        self.blocks.release(self.slots.release(slot))

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or holds a slot."""
        return len(self.waiting) > 0 or self.slots.num_free < self.max_requests

    @property
    def next_step(self) -> int:
        """Number of the step that is planned next."""
        return self._plan_builder.next_step

    # ---- Planning a step ---------------------------------------------------------------------

    def prepare_step(self) -> StepPlan | None:
        """Decide the next step: CPU only, and without waiting for any step in flight.

        Returns:
            the plan, already counted as launched; None when nothing can run before a step in
            flight is resolved (or there is no work). A plan without rows is a dummy step.
        """
        builder = self._plan_builder
        decode, prefill = self._schedule()
        wanted = builder.shape_of(decode, prefill)
        shape = self.agree(builder.next_step, wanted, self.has_unfinished_requests())
        if shape.is_empty:
            return None
        plan = builder.build(decode, prefill, shape)
        if prefill:
            is_under_way = self.slots.state == SlotState.PREFILLING
            self._prefilling = [slot for slot in self._prefilling if is_under_way[slot]]
        return plan

    def prepare_dummy_step(self) -> StepPlan | None:
        """A step in which no request of this rank runs, if other ranks need one; else None."""
        builder = self._plan_builder
        shape = self.agree(builder.next_step, StepShape(), False)
        return None if shape.is_empty else builder.build(NO_SLOTS, [], shape)

    def _schedule(self) -> tuple[IntArray, list[PrefillChunk]]:
        """Decode slots and prefill chunks of the next step; both empty if nothing can run."""
        while True:
            for micro_batch in self.micro_batches.in_turn():
                with self.tracer.range("schedule", self._plan_builder.next_step):
                    decode = self._schedule_decode(micro_batch)
                    prefill = self._schedule_prefill(micro_batch, self.max_tokens - len(decode))
                if len(decode) or prefill:
                    self.micro_batches.took(micro_batch, feeds_back=len(decode) > 0)
                    return decode, prefill
            if not self._make_room():
                return NO_SLOTS, []

    def _schedule_decode(self, micro_batch: int) -> IntArray:
        """Slots of a micro-batch that decode one token this step, each with a block for it.

        When blocks run out, they go to the requests first in rank; the others pause.
        """
        slots = self.slots
        wants = (slots.state >= SlotState.DECODING) & (slots.num_launched < slots.max_length)
        # Under a grammar the mask of a token needs the token before it: one may be in flight.
        wants &= slots.num_launched - slots.num_known < slots.most_in_flight
        rows = self.micro_batches.members(np.flatnonzero(wants).astype(np.int32), micro_batch)
        # The token to be decoded stands at num_launched - 1, and needs a place in the cache.
        full = slots.num_launched[rows] > slots.num_blocks[rows] * self.block_size_tokens
        needy = rows[full]
        if len(needy) == 0:
            return rows
        if len(needy) > self.blocks.free:
            by_rank = needy[np.argsort(slots.rank[needy])]
            needy, starved = np.split(by_rank, [self.blocks.free])
            rows = np.setdiff1d(rows, starved, assume_unique=True)
            self._pause(starved)
        self._resume(needy)
        self._give_blocks(needy)
        return rows

    def _give_blocks(self, rows: IntArray) -> None:
        """One more block for each of `rows`."""
        indices = self.slots.num_blocks[rows]
        blocks = self.blocks.allocate(len(rows))
        self.slots.block_table[rows, indices] = blocks
        self.slots.num_blocks[rows] = indices + 1
        self._plan_builder.add_block_updates(rows, indices, blocks)

    def _schedule_prefill(self, micro_batch: int, budget: int) -> list[PrefillChunk]:
        """Prefill chunks for at most `budget` tokens of a micro-batch: prompts under way first,
        then new requests."""
        chunks: list[PrefillChunk] = []
        for slot in self._prefilling:
            if slot % self.slots.num_micro_batches == micro_batch:
                budget -= self._add_chunk(chunks, slot, budget)
        while budget > 0 and self._may_admit(micro_batch, budget):
            budget -= self._add_chunk(chunks, self._admit(self.waiting.pop(), micro_batch), budget)
        return chunks

    def _add_chunk(self, chunks: list[PrefillChunk], slot: int, budget: int) -> int:
        start = int(self.slots.num_prefilled[slot])
        length = min(int(self.slots.num_known[slot]) - start, budget)
        if length > 0:
            chunks.append(PrefillChunk(slot, start, start + length))
        return max(length, 0)

    def _may_admit(self, micro_batch: int, budget: int) -> bool:
        slots, queue = self.slots, len(self.waiting)
        if not queue or not self.micro_batches.may_admit(micro_batch, queue):
            return False
        if np.any(slots.state == SlotState.PAUSED):
            return False
        known = self.waiting.first().num_known
        splits = self.config.enable_chunked_prefill or known > self.max_tokens
        if known > budget and not splits:
            return False
        running = slots.state == SlotState.DECODING
        soon = slots.num_launched + ADMISSION_HORIZON > slots.num_blocks * self.block_size_tokens
        reserve = int(np.count_nonzero(running & soon))
        return -(-known // self.block_size_tokens) + reserve <= self.blocks.free

    def _admit(self, waiting: WaitingRequest, micro_batch: int) -> int:
        """Give a request its slot and the blocks of all its known tokens."""
        request, slots = waiting.request, self.slots
        slot = slots.acquire(request, waiting.rank, waiting.seed, waiting.max_length, micro_batch)
        count = -(-waiting.num_known // self.block_size_tokens)
        blocks = self.blocks.allocate(count)
        indices = np.arange(count, dtype=np.int32)
        slots.block_table[slot, :count] = blocks
        slots.num_blocks[slot] = count
        self._plan_builder.add_block_updates(np.full(count, slot, np.int32), indices, blocks)
        self._prefilling.append(slot)
        self.recomputed_tokens += waiting.num_computed
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS
        request.add_event(DynamicInferenceEventType.ADD_CONTEXT)
        return slot

    # ---- Memory pressure ---------------------------------------------------------------------

    def _pause(self, starved: IntArray) -> None:
        """Let requests without a block sit out this step; they keep slot and blocks, up to the
        limit for paused requests. `starved` is in order of rank."""
        slots = self.slots
        newly = starved[slots.state[starved] != SlotState.PAUSED]
        slots.state[newly] = SlotState.PAUSED
        self.pauses += len(newly)
        for slot in newly:
            request = slots.request_at(slot)
            request.status = Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
            request.add_event(DynamicInferenceEventType.PAUSE)
        held = int(slots.num_blocks[starved].sum())
        held += self.micro_batches.blocks_paused_beside(starved)
        first = slots.rank[slots.state != SlotState.FREE].min()
        for slot in starved[::-1]:
            # The first in rank is never evicted, so that it runs on to its end. Otherwise requests
            # could evict each other in turn, each time before a sample of theirs is booked.
            if held <= self._max_paused_blocks or slots.rank[slot] == first:
                break
            held -= int(slots.num_blocks[slot])
            self._evict(slot)

    def _resume(self, rows: IntArray) -> None:
        """Continue requests that get a block; `rows` may contain running ones too."""
        slots = self.slots
        paused = rows[slots.state[rows] == SlotState.PAUSED]
        slots.state[paused] = SlotState.DECODING
        for slot in paused:
            slots.request_at(slot).status = Status.ACTIVE_AND_GENERATING_TOKENS

    def _make_room(self) -> bool:
        """Nothing can run: evict the paused request last in rank if that is what it takes.

        Returns:
            whether planning is worth another try.
        """
        state = self.slots.state
        if not np.any(state == SlotState.PAUSED):
            return False
        if np.any(state == SlotState.DECODING):
            # At their length limits, their last tokens in flight: their blocks are back at the next
            # resolve, which is sooner than a prefill from the start.
            return False
        if self.blocks.free == 0:
            paused = np.flatnonzero(state == SlotState.PAUSED)
            self._evict(paused[np.argmax(self.slots.rank[paused])])
        return True

    def _evict(self, slot: int) -> None:
        """Take everything from a request, and queue it again.

        Samples of it in flight become zombies; they will be sampled again, to the same tokens.
        """
        self.slots.request_at(slot).add_event(DynamicInferenceEventType.EVICT)
        self.evictions += 1
        self._requeue(slot)

    def _requeue(self, slot: int) -> None:
        slots, request = self.slots, self.slots.request_at(slot)
        rank, seed, longest = slots.rank[slot], slots.seed[slot], slots.max_length[slot]
        waiting = WaitingRequest(request, int(rank), int(seed), int(longest))
        waiting.num_computed = slots.num_computed(slot)
        self.release_request(slot)
        self.waiting.add(waiting)
        request.status = Status.WAITING_IN_QUEUE

    def evict_all(self) -> None:
        """Evict every request that holds a slot."""
        for slot in np.flatnonzero(self.slots.state != SlotState.FREE):
            self._evict(int(slot))

    def take_back(self, plans: list[StepPlan]) -> None:
        """Undo `plans`, the last ones built, whose steps are over and will not be resolved."""
        for plan in reversed(plans):
            take_back(plan, self.slots, self.blocks, self._prefilling, self._requeue)
        self._plan_builder.next_step = plans[0].step
        self.expect_step()

    # ---- To the device and back --------------------------------------------------------------

    def transfer_bookkeeping_to_gpu(self, plan: StepPlan) -> None:
        """Launch the step's one host-to-device copy, beside the step before it."""
        staged = self._staging.pack(plan, self.slots)
        compute, upload = self.device.compute, self.device.upload
        upload.launch(partial(self.gpu_view.receive, staged, plan.step))
        if upload is not compute:
            arrived = self._arrived[plan.step % len(self._arrived)]
            upload.record(arrived)
            compute.wait(arrived)

    def transfer_dummy_rows_to_gpu(self, dims: BatchDimensions) -> None:
        """Make a step of dummy rows alone the next on the device, for capturing a graph of a shape;
        waits until it is there."""
        plan = dummy_plan(dims)
        self.transfer_bookkeeping_to_gpu(plan)
        self.expect_step(plan.step)
        done = self.device.event()
        self.device.compute.record(done)
        done.wait()

    def expect_step(self, step: int | None = None) -> None:
        """Make the device count steps from `step` on; None: from the next plan."""
        step = self._plan_builder.next_step if step is None else step
        self.device.compute.launch(partial(self.gpu_view.expect_step, step))

    def update_requests(
        self, plan: StepPlan, sampled: IntArray, log_probs: IntArray | None = None
    ) -> StepOutput:
        """Book the samples of a resolved step.

        Args:
            plan: of that step.
            sampled: `[rows]` token ids, host memory; copied.
            log_probs: int32 `[rows, OUT_WORDS]`, host memory; copied.

        Returns:
            the live rows' tokens, and which requests ended. The caller releases those.
        """
        return book_samples(plan, self.slots, sampled, log_probs)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block and slot has exactly one owner."""
        check_integrity(self.slots, self.blocks, self._prefilling)
