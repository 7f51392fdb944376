"""`DynamicInferenceContext`: the state of requests, slots and KV blocks on the CPU, and plans.

`context.foo` is always CPU; `context.gpu_view.foo` is always device. The context launches nothing
on the device except the one copy of a step's bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_async.choices import Choices
from megatron_async.config import InferenceConfig
from megatron_async.device_state.cache_layout import block_needs
from megatron_async.device_state.device_memory import make_gpu_view, max_paused_blocks, share_states
from megatron_async.devices import Device, make_device, makes_ordinary_tensors
from megatron_async.models.partition import is_recurrent
from megatron_async.names_of_megatron import NamesOfMegatron
from megatron_async.observe.timeline import Timeline
from megatron_async.observe.tracer import Tracer
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.recurrent.recurrent_pools import GRID
from megatron_async.planning.admission import AdmissionQueue, rank_of
from megatron_async.planning.draft_books import DraftBooks
from megatron_async.planning.graph_shapes import make_graph_shapes
from megatron_async.planning.host_staging import HostStaging
from megatron_async.planning.integrity import check_integrity
from megatron_async.planning.kv_block_allocator import KVBlockAllocator
from megatron_async.planning.micro_batches import MicroBatches
from megatron_async.planning.plan_builder import PlanBuilder, dummy_plan
from megatron_async.planning.prefix_cache import PrefixCache
from megatron_async.planning.request_slots import NO_DECODE, RequestSlots
from megatron_async.planning.scheduler import Scheduler
from megatron_async.planning.state_rows import StateRows
from megatron_async.planning.step_output import StepOutput, book_samples
from megatron_async.planning.step_plan import IntArray, StepPlan, StepShape
from megatron_async.requests.inference_request import DynamicInferenceRequest, Status
from megatron_async.requests.routing_record import RoutingRecord

Agree = Callable[[int, StepShape, bool], StepShape]
"""From a step's number, the shape that this rank wants for it, and whether it has unfinished
requests, to the shape in which all ranks that share experts launch it."""


def alone(step: int, wanted: StepShape, has_work: bool) -> StepShape:
    """`Agree` of a rank that shares no experts: the shape that this rank wants."""
    return wanted


class DynamicInferenceContext(NamesOfMegatron):
    """Schedules requests over a paged KV cache.

    Args:
        model_config: Megatron's `TransformerConfig` of the model; a `HybridModel`'s must carry
            `hybrid_layer_pattern` (see `models.hybrid.ModelConfig`).
        inference_config: settings of the engine.
        device: the device to run on; made from `inference_config.device` when None.
        timeline: where the named ranges of this context, its controller and its engine are kept,
            or None.
        progress: show bars of what is measured at the start.

    Attributes:
        gpu_view: the device's snapshot of the running step.
        memories: what a suspended engine can give back, by tag; "weights" if the engine owns them.
        slots: per-request state.
        blocks: ownership of KV blocks.
        scheduler: decides which requests run in the next step; counts pauses and evictions.
        graph_shapes: padded shapes that have, or will have, a captured graph.
        prefix_cache: finds blocks by their content; None without `enable_prefix_caching`.
        sharing: of recurrent states, with a prefix cache; else None.
        drafts: reports of drafts from booked steps; None without speculation.
        choices: what times on the device have decided.
    """

    @makes_ordinary_tensors
    def __init__(
        self,
        model_config: Any,
        inference_config: InferenceConfig,
        device: Device | None = None,
        timeline: Timeline | None = None,
        progress: bool = False,
    ) -> None:
        self.config = inference_config
        self.model_config = model_config
        self.device = device or make_device(inference_config.device)
        self.tracer = Tracer(self.device, timeline, inference_config.nvtx)
        self.block_size_tokens = inference_config.block_size_tokens
        self.max_requests = inference_config.max_requests
        self.max_tokens = inference_config.max_tokens
        self.max_sequence_length = inference_config.max_sequence_length

        self.sharing = sharing = share_states(model_config, inference_config, self.device)
        self.choices = Choices(inference_config.choices, self.device, progress)
        self.gpu_view = make_gpu_view(
            model_config, inference_config, self.device, sharing, self.choices
        )
        self.memories = {"kv_cache": self.gpu_view.pools}
        dummy_block = self.gpu_view.kv_cache.dummy_block
        self.blocks = KVBlockAllocator(dummy_block)
        max_blocks = -(-self.max_sequence_length // self.block_size_tokens)
        stages = getattr(model_config, "pipeline_model_parallel_size", 1)
        self.slots = RequestSlots(
            self.max_requests,
            self.max_sequence_length,
            max_blocks,
            stages,
            inference_config.decode_width,
            inference_config.draft_places,
            block_needs(self.gpu_view.kv_cache.layout.windows, inference_config),
        )
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
            is_recurrent(model_config),
        )
        self._is_recurrent = is_recurrent(model_config)
        self._plan_builder = PlanBuilder(self.slots, self.graph_shapes)
        self.prefix_cache = None
        if inference_config.enable_prefix_caching:
            states = None
            if sharing is not None:
                states = StateRows(
                    self.slots,
                    self.max_requests + sharing.snapshots,
                    self.block_size_tokens,
                    GRID,
                    sharing.interval,
                    sharing.limit,
                )
            self.prefix_cache = PrefixCache(self.slots, self.blocks, self.block_size_tokens, states)
            if states is not None:
                self._plan_builder.plan_states = self.prefix_cache.plan_states
        self.drafts = None
        if count := inference_config.num_speculative_tokens:
            self.drafts = DraftBooks(self.slots, count, inference_config.chooses_widths)
        self.scheduler = Scheduler(
            inference_config,
            self.slots,
            self.blocks,
            self._plan_builder,
            self.tracer,
            max_paused_blocks(model_config, inference_config, self.blocks.total, self.device),
            GRID if self._is_recurrent else 1,
            self.prefix_cache,
            self.drafts,
        )
        self._arrivals = 0

    # ---- Requests in and out -----------------------------------------------------------------

    def add_request(self, request: DynamicInferenceRequest, max_length: int) -> None:
        """Queue a request that the engine has found servable."""
        if self.prefix_cache is not None:
            self.prefix_cache.prepare(request)
        if self.config.enable_routing_replay:
            request.routing = RoutingRecord()
        request.rank, request.max_length = rank_of(self._arrivals, request.priority), max_length
        self._arrivals += 1
        self.waiting.add(request)

    def release_request(self, slot: int) -> None:
        """End the request in `slot`: its blocks and slot are free at once (rows in flight become
        zombies), its generated tokens stay with the request."""
        self.scheduler.release(slot)

    @property
    def waiting(self) -> AdmissionQueue:
        """Requests without a slot."""
        return self.scheduler.waiting

    @property
    def micro_batches(self) -> MicroBatches:
        """Which of the requests the next step serves."""
        return self.scheduler.micro_batches

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or holds a slot."""
        return len(self.waiting) > 0 or self.slots.num_free < self.max_requests

    @property
    def next_step(self) -> int:
        """Number of the step that is planned next."""
        return self._plan_builder.next_step

    # ---- Planning a step ---------------------------------------------------------------------

    def prepare_step(
        self, agree: Agree = alone, prefill_limit: int | None = None
    ) -> StepPlan | None:
        """Decide the next step: CPU only, and without waiting for any step in flight.

        Args:
            agree: agrees on the step's shape with other ranks.
            prefill_limit: most prompt tokens beside decode rows; None: as for the step before.

        Returns:
            the plan, already counted as launched; None when nothing can run before a step in
            flight is resolved (or there is no work). A plan without rows is a dummy step.
        """
        builder, step = self._plan_builder, self._plan_builder.next_step
        if prefill_limit is not None:
            self.scheduler.prefill_limit = prefill_limit
        decode, prefill = self.scheduler.schedule()
        wanted = builder.shape_of(decode, prefill)
        shape = agree(step, wanted, self.has_unfinished_requests())
        if shape.is_empty:
            return None
        plan = builder.build(decode, prefill, shape)
        if prefill:
            self.scheduler.forget_prefilled()
        return plan

    def prepare_dummy_step(self, agree: Agree = alone) -> StepPlan | None:
        """A step in which no request of this rank runs, if other ranks need one; else None."""
        builder = self._plan_builder
        shape = agree(builder.next_step, StepShape(), False)
        return None if shape.is_empty else builder.build(NO_DECODE, [], shape)

    def evict_all(self, keeps_routing: bool = False) -> None:
        """Evict every request that holds a slot, and empty the prefix cache: KV content is lost.

        Args:
            keeps_routing: the routing records of what was computed stay; else all of them are
                written anew.
        """
        self.reset_prefix_cache()
        self.scheduler.evict_all()
        if not keeps_routing:
            self._forget_routing()

    def _forget_routing(self) -> None:
        """No request holds a slot, and what they have computed is of no use any more."""
        for request in self.waiting.in_order() if self.config.enable_routing_replay else ():
            assert request.routing is not None, "it was queued"
            request.routing.forget()

    def start_again(self, requests: list[DynamicInferenceRequest]) -> None:
        """Write the books anew, after something has left them half written: no step is in flight,
        no request holds a slot, nothing is cached, and `requests` wait, with the tokens that they
        have."""
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
        self.slots.clear()
        self.blocks.clear()
        self._plan_builder.clear()
        self._staging.forget_all()
        self.scheduler.prefilling = []
        self.waiting.clear()
        for request in requests:
            request.num_computed = 0
            self.waiting.add(request)
            request.status = Status.WAITING_IN_QUEUE
        self._forget_routing()
        self.expect_step()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Requests that hold a slot go on, but their blocks are not cached
        any more."""
        if self.prefix_cache is not None:
            self.prefix_cache.reset()

    def step_failed(self, plan: StepPlan) -> None:
        """A plan's step failed: its KV entries were not written; its requests are about to end."""
        if self.prefix_cache is not None:
            self.prefix_cache.failed(plan)

    def plan_again(self, step: int) -> None:
        """Number the next plan `step`: the plans from that number on are taken back."""
        self._plan_builder.next_step = step
        self.expect_step()

    # ---- To the device and back --------------------------------------------------------------

    def transfer_bookkeeping_to_gpu(self, plan: StepPlan) -> None:
        """Launch the step's one host-to-device copy, beside the step before it; none if the device
        has the same words from the step before the last ones in flight."""
        compute, upload = self.device.compute, self.device.upload
        try:
            staged = self._staging.pack(plan, self.slots)
            if staged is None:
                return
            upload.launch(partial(self.gpu_view.receive, staged, plan.step))
            if upload is not compute:
                arrived = self._arrived[plan.step % len(self._arrived)]
                upload.record(arrived)
                compute.wait(arrived)
        except BaseException:
            self._staging.forget(plan.step)
            raise

    def transfer_dummy_rows_to_gpu(self, dims: BatchDimensions) -> None:
        """Copy a step that has only dummy rows to the device, to capture a graph of its shape;
        waits until the copy has arrived."""
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
        self,
        plan: StepPlan,
        sampled: IntArray,
        counts: IntArray,
        log_probs: IntArray | None = None,
        drafts: IntArray | None = None,
    ) -> StepOutput:
        """Book the samples of a resolved step.

        Args:
            plan: of that step.
            sampled: int32 `[rows, most tokens of a row]` token ids, host memory; copied.
            counts: int32 `[rows]`: how many of them each row yields.
            log_probs: int32 `[rows, most tokens of a row, OUT_WORDS]`, host memory; copied.
            drafts: int32 `[rows, drafts]` for the next step, host memory; copied. None where
                nothing is drafted.

        Returns:
            the live rows' tokens, and which requests ended. The caller releases those.
        """
        verified = None
        if self.drafts is not None and drafts is not None:
            verified = self.drafts.book(plan, sampled, counts, drafts)
        return book_samples(plan, self.slots, sampled, counts, log_probs, verified)

    def counters(self) -> dict[str, float | int]:
        """The entries of `engine.stats()` that the scheduler, the blocks and the cache know."""
        scheduler, blocks, cache = self.scheduler, self.blocks, self.prefix_cache
        states = None if cache is None else cache.states
        return {
            "prefill_limit": scheduler.prefill_limit,
            "pipeline_bubble": self.micro_batches.bubble_share,
            "recomputed_tokens": scheduler.recomputed_tokens,
            "prefix_cache_queries": 0 if cache is None else cache.queries,
            "prefix_cache_hits": 0 if cache is None else cache.hits,
            "prefix_cache_lost_no_state": 0 if cache is None else cache.lost_states,
            "prefix_cache_lost_evicted": 0 if cache is None else cache.lost_blocks,
            "prefix_cache_blocks": blocks.cached,
            "prefix_cache_evictions": 0 if cache is None else cache.evictions,
            "prefix_cache_snapshots": 0 if states is None else len(states),
            "prefix_cache_snapshot_hits": 0 if states is None else states.hits,
            "prefix_cache_snapshot_evictions": 0 if states is None else states.evictions,
            "pauses": scheduler.pauses,
            "evictions": scheduler.evictions,
            "waiting_requests": len(self.waiting),
            "slots": self.max_requests,
            "slots_in_use": self.max_requests - self.slots.num_free,
            "kv_blocks": blocks.total,
            "kv_blocks_in_use": blocks.total - blocks.allocatable,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block, slot, state row and waiting token is accounted
        for once."""
        self.waiting.check_integrity()
        check_integrity(self.slots, self.blocks, self.scheduler.prefilling)
        if self.prefix_cache is not None and self.prefix_cache.states is not None:
            self.prefix_cache.states.check_integrity()
