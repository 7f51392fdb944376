"""`DynamicInferenceContext` as Megatron's scripts use it, and Megatron's counters of steps, kept by
listening to our engine. Errors are Megatron's own classes.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, Protocol

import numpy as np
from megatron.core.inference.config import InferenceConfig as MegatronConfig
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts.dynamic_context import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextErrorFactory,
    ContextOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TensorStateDeallocatedError,
    TokenOverflowError,
    get_mem_size_str,
)
from megatron.core.inference.contexts.dynamic_context import (
    DynamicInferenceContext as MegatronContext,
)
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    DecodeOnly,
)

from megatron_async.compat.conversions.memory_limits import KVBlockCounts
from megatron_async.compat.conversions.settings import DEFAULT_MAX_TOKENS, to_settings
from megatron_async.compat.models.serving_config import serving_config
from megatron_async.config import InferenceConfig
from megatron_async.device_state.device_memory import block_shape, max_paused_blocks
from megatron_async.devices import Device
from megatron_async.engine.listener import EngineListener
from megatron_async.names_of_megatron import answers_calls
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.observe.timeline import Timeline
from megatron_async.planning.dynamic_context import DynamicInferenceContext as OwnContext
from megatron_async.planning.request_slots import SlotState
from megatron_async.planning.step_output import StepOutput
from megatron_async.planning.step_plan import StepPlan
from megatron_async.step.text_generation_controller import LaunchedStep


class StepWatch(EngineListener):
    """A few numbers a step.

    Attributes:
        step_count: steps that were resolved.
        prefill_tokens: tokens that were prefilled.
        with_zombies: of the resolved ones, those with rows of requests that had ended.
        last_plan: of the step launched last; None before the first.
        graph_requests: rows, padding included, of the captured shape of the step resolved last;
            None if it was launched kernel by kernel.
        decode_only: of the last turn of the engine's loop.
    """

    def __init__(self) -> None:
        self._statistics = EngineStatistics()
        self.reset()

    def count_with(self, statistics: EngineStatistics) -> None:
        """Take what an engine counts itself from its `statistics`."""
        self._statistics = statistics
        self.reset()

    def reset(self) -> None:
        """Count from 0."""
        self.step_count = self.prefill_tokens = self.with_zombies = 0
        self._overlapped_before = self._statistics.overlapped_steps
        self.last_plan: StepPlan | None = None
        self.graph_requests: int | None = None
        self.decode_only = DecodeOnly(consumed=None, launched=None)
        self._launched: bool | None = None
        self._consumed: bool | None = None

    @property
    def overlapped(self) -> int:
        """Steps launched while another was in flight."""
        return self._statistics.overlapped_steps - self._overlapped_before

    def launched(self, plan: StepPlan | None) -> None:
        """Count it."""
        if plan is None:
            return
        self.last_plan = plan
        self.prefill_tokens += len(plan.prefill_token_ids)
        self._launched = plan.num_decode == plan.num_rows

    def resolved(self, step: LaunchedStep) -> None:
        """Count it."""
        self.step_count += 1
        plan = step.plan
        self.graph_requests = plan.dims.rows if plan.dims.is_captured else None
        self._consumed = plan.num_decode == plan.num_rows

    def end_turn(self, outputs: list[StepOutput]) -> None:
        """The engine reports; `outputs` are the resolved steps'."""
        self.with_zombies += sum(output.zombie_rows > 0 for output in outputs)
        self.decode_only = DecodeOnly(consumed=self._consumed, launched=self._launched)
        self._launched = self._consumed = None
        if not outputs:
            self.graph_requests = None


__all__ = [
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "ContextErrorFactory",
    "ContextOverflowError",
    "DynamicInferenceContext",
    "MaxSequenceLengthOverflowError",
    "RequestOverflowError",
    "TensorStateDeallocatedError",
    "TokenOverflowError",
    "get_mem_size_str",
]

logger = logging.getLogger("megatron_async")


class Resettable(Protocol):
    """An engine, for its context."""

    def reset(self, preserve_prefix_cache: bool, *, preserve_counters: bool) -> None:
        """Remove all requests."""
        ...


@answers_calls
class DynamicInferenceContext(OwnContext):
    """Our context, made from Megatron's configuration, with the numbers that scripts read.

    Args:
        model_config: the model's `TransformerConfig`.
        inference_config: Megatron's, its subclass with our fields, or our own.
        device, timeline: of our context.

    Attributes:
        megatron_config: Megatron's configuration as it was given; its defaults where our own was.
        kv_block_allocator: numbers of KV blocks under Megatron's names.
        watch: counts steps; the engine puts it among its listeners.
        unified_memory_level: always 0.

    Raises:
        ConfigurationError: a value that is not served, by the name of its field.
        OutOfMemoryError: what was asked for does not fit into the device's memory.
    """

    DEFAULT_MAX_TOKENS = DEFAULT_MAX_TOKENS
    unified_memory_level = 0

    def __init__(
        self,
        model_config: Any,
        inference_config: MegatronConfig | InferenceConfig,
        device: Device | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        states = getattr(inference_config, "mamba_inference_state_config", None)
        pattern = None if states is None else states.layer_type_list
        described = serving_config(model_config, pattern)
        settings = to_settings(described, inference_config)
        super().__init__(described, settings, device, timeline)
        assert settings.given is not None
        given = self.megatron_config = settings.given
        self.watch = StepWatch()
        self.kv_cache_management_mode = KVCacheManagementMode(given.kv_cache_management_mode)
        self.static_kv_memory_pointers = given.static_kv_memory_pointers
        self.enable_prefix_caching = settings.enable_prefix_caching
        self.enable_chunked_prefill = settings.enable_chunked_prefill
        self.num_speculative_tokens = settings.num_speculative_tokens
        self.is_hybrid_model = self._is_recurrent
        self.params_dtype = model_config.params_dtype
        self.block_size_bytes = block_shape(described, settings).num_bytes
        self.max_kv_block_count = -(-self.max_sequence_length // self.block_size_tokens)
        paused = max_paused_blocks(described, settings, self.blocks.total, self.device)
        caches = settings.enable_prefix_caching
        self.kv_block_allocator = KVBlockCounts(self.blocks, self.slots, paused, caches)
        self._engine: weakref.ref[Resettable] | None = None
        if getattr(given, "_verbose", False):
            self._log_summary()

    # ---- Megatron's counters -----------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Steps that were resolved since the last `reset`."""
        return self.watch.step_count

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Tokens that were prefilled since the last `reset`."""
        return self.watch.prefill_tokens

    @property
    def async_sched_step_count(self) -> int:
        """Steps that were launched while another was in flight, since the last `reset`."""
        return self.watch.overlapped

    @property
    def async_sched_compaction_step_count(self) -> int:
        """Resolved steps with rows of requests that had ended, since the last `reset`."""
        return self.watch.with_zombies

    # ---- Requests ----------------------------------------------------------------------------

    @property
    def total_request_count(self) -> int:
        """Requests that hold a slot, paused ones among them."""
        return self.max_requests - self.slots.num_free

    @property
    def paused_request_count(self) -> int:
        """Requests that hold a slot and wait for a block."""
        return int(np.count_nonzero(self.slots.state == SlotState.PAUSED))

    @property
    def num_prefill_requests(self) -> int:
        """Requests that hold a slot and whose prompt is not in the cache yet."""
        return int(np.count_nonzero(self.slots.state == SlotState.PREFILLING))

    @property
    def num_decode_requests(self) -> int:
        """Requests that decode."""
        return int(np.count_nonzero(self.slots.state == SlotState.DECODING))

    @property
    def active_token_count(self) -> int:
        """Query tokens of the step launched last, without padding; 0 while no request is there."""
        plan = self.watch.last_plan
        if plan is None or not self.total_request_count:
            return 0
        decode = int(plan.widths[: plan.num_decode].sum())
        return decode + len(plan.prefill_token_ids)

    def get_active_request_count(self) -> int:
        """Requests that hold a slot and are not paused."""
        return self.total_request_count - self.paused_request_count

    def is_decode_only(self) -> bool:
        """Whether no request is being prefilled."""
        return self.num_prefill_requests == 0

    def is_static_batching(self) -> bool:
        """Never."""
        return False

    def is_dynamic_batching(self) -> bool:
        """Always."""
        return True

    def is_chunked_prefill_enabled(self) -> bool:
        """Whether prompts are split over steps."""
        return self.enable_chunked_prefill

    def using_cuda_graph_this_step(self) -> bool:
        """Whether the step launched last replays a captured graph."""
        plan = self.watch.last_plan
        return plan is not None and plan.dims.is_captured

    @property
    def cuda_graph_batch_dimensions_list(self) -> list[Any]:
        """Shapes with a captured graph, largest first (`BatchDimensions` of this project)."""
        return list(self.graph_shapes.all_shapes()) if self.graph_shapes.decode_sizes else []

    @property
    def cuda_graph_token_counts(self) -> list[int] | None:
        """Query tokens of these shapes, each once, largest first; None without graphs."""
        counts = {shape.tokens for shape in self.cuda_graph_batch_dimensions_list}
        return sorted(counts, reverse=True) or None

    def get_kvcache_utilization_stats(self) -> dict[str, float | int]:
        """Occupancy of slots and KV blocks now, under Megatron's names; shares are 0 to 1."""
        counts = self.kv_block_allocator
        total, used, active = self.blocks.total, counts.get_total_used(), counts.get_active_used()
        return {
            "total_blocks": total,
            "allocated_blocks": used,
            "active_unique_blocks": active,
            "allocated_utilization": used / max(total, 1),
            "active_utilization": active / max(total, 1),
            "active_request_count": self.get_active_request_count(),
            "paused_request_count": self.paused_request_count,
            "block_count_avail": counts.total_avail,
            "active_token_count": self.active_token_count,
            "total_request_count": self.total_request_count,
            "max_requests": self.max_requests,
        }

    # ---- Beginning anew ----------------------------------------------------------------------

    def belong_to(self, engine: Resettable) -> None:
        """An engine works with this context from now on."""
        self._engine = weakref.ref(engine)

    def reset(
        self, preserve_prefix_cache: bool = False, *, preserve_counters: bool = False
    ) -> None:
        """Remove all requests, forget what blocks hold, and count from 0: what
        `DynamicInferenceEngine.reset` does, where there is an engine."""
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            engine.reset(preserve_prefix_cache, preserve_counters=preserve_counters)
        elif not preserve_counters:
            self.watch.reset()

    def _log_summary(self) -> None:
        """Megatron's `verbose`."""
        logger.info(
            "context on %s: %d requests, %d tokens a step, sequences of %d tokens; %d KV blocks of "
            "%d tokens (%s each)",
            self.device.torch_device,
            self.max_requests,
            self.max_tokens,
            self.max_sequence_length,
            self.blocks.total,
            self.block_size_tokens,
            get_mem_size_str(self.block_size_bytes),
        )


# Megatron asks `isinstance`, and a context of ours is one.
MegatronContext.register(DynamicInferenceContext)
