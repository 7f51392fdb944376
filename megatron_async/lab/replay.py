"""`Replay`: a recorded run once more, through the real engine and scheduler, without its model; and
an engine's books as text, for people who look for a bug."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import msgspec
import numpy as np

from megatron_async.config import InferenceConfig
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.engine.listener import EngineListener
from megatron_async.errors import RecordingError
from megatron_async.lab.model_less import ModelLessEngine
from megatron_async.lab.recorded_text import text_ends, watch_as_recorded, without_text
from megatron_async.lab.recording import (
    COUNTERS,
    PLAN_FIELDS,
    Aborted,
    Added,
    Event,
    EvictedAll,
    Launched,
    PrefillLimit,
    Recording,
    Resolved,
    TextEnd,
    Updated,
    plan_checksums,
)
from megatron_async.lab.simulated_tokens import cached_tokens
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.kv_block_allocator import KVBlockAllocator
from megatron_async.planning.request_slots import RequestSlots, SlotState
from megatron_async.planning.step_plan import IntArray, StepPlan

WITHOUT_EFFECT = (
    "device", "buffer_size_gb", "num_cuda_graphs", "use_cuda_graphs_for_non_decode_steps",
    "cuda_graph_mixed_prefill_count", "attention_backend", "check_integrity",
    "async_sched_mode", "inference_sampling_seed", "logging_step_interval",
    "prefix_caching_mamba_gb", "target_tpot_ms", "mixed_step_tokens", "late_launch", "nvtx",
    "choices", "enable_routing_replay", "batch_invariant_mode",
)  # fmt: skip
"""Settings that no plan depends on. Pools are recorded as numbers of blocks and of snapshots, and
what a clock has decided (`target_tpot_ms`, `mixed_step_tokens`) as events."""
POOLS = "num_kv_blocks", "num_state_snapshots", "prefix_caching_mamba_interval"
"""Settings that may be left to the memory that there is."""


class Replay:
    """Replays a recording, step for step. No weights are needed, so it goes on where these change:
    samples are the recorded ones, and what an update does to plans follows from its policy.

    Args:
        recording: the run.
        config: settings to replay it with, which must plan as the recorded ones do; None: those.

    Attributes:
        engine: as it stands.

    Raises:
        RecordingError: `config` differs from the recorded one; the message names the setting.
    """

    def __init__(self, recording: Recording, config: InferenceConfig | None = None) -> None:
        if config is not None:
            _check_config(recording.config, config)
        self._recording = recording
        config = replace(
            config or recording.config,
            num_kv_blocks=recording.config.num_kv_blocks,
            logging_step_interval=0,
            target_tpot_ms=None,
            mixed_step_tokens=None,
            late_launch=False,
        )
        self.engine = ModelLessEngine(recording.shape, config, _RecordedTokens(recording))
        self._comparer = _PlanComparer(self.engine.context.blocks)
        self.engine.listeners.append(self._comparer)
        self._text_ends = text_ends(recording.events)

    def run(self, until_step: int | None = None) -> int:
        """Replay to the end, or until step `until_step` has been planned.

        Returns:
            how many steps were planned.

        Raises:
            RecordingError: a plan or a counter differs from the recorded one; the message names the
                first step and field. Or there is no step `until_step`.
        """
        for index, event in enumerate(self._recording.events):
            self._play(index, event)
            if isinstance(event, Launched) and event.step is not None and event.step == until_step:
                return event.step + 1
        steps = self.engine.statistics.steps
        if until_step is not None:
            raise RecordingError(
                f"there is no step {until_step}: the recording has steps 0 to {steps - 1}."
            )
        self._check_counters()
        return steps

    def _play(self, index: int, event: Event) -> None:
        engine = self.engine
        if isinstance(event, Added):
            self._add(event, self._text_ends.get(index))
        elif isinstance(event, Aborted):
            engine.abort_request(event.request_id)
        elif isinstance(event, EvictedAll):
            engine.context.evict_all()
        elif isinstance(event, PrefillLimit):
            engine.context.scheduler.prefill_limit = event.tokens
        elif isinstance(event, Updated):
            if event.step != engine.context.next_step:
                raise RecordingError(f"the weights change before step {event.step}, but not here.")
            engine.loop.weight_books.change(event.version, event.policy)
            engine.requests.take_ended()
        elif isinstance(event, Launched):
            self._comparer.expected = event
            engine.launch_step()
            self._comparer.check_seen()
        elif isinstance(event, Resolved):
            if not engine.in_flight or engine.in_flight[0].plan.step != event.step:
                raise RecordingError(f"step {event.step} is not in flight, but was then.")
            engine.resolve_step()
            engine.requests.take_ended()

    def _add(self, event: Added, text_end: TextEnd | None) -> None:
        params = event.sampling_params()
        number, plain = event.request_id, without_text(params)
        if event.moved is None:
            prompt = np.array(event.prompt, np.int32)
            future = self.engine.add_request(number, prompt, plain, event.priority)
        else:
            moved = {**event.moved, "params": msgspec.to_builtins(plain, str_keys=True)}
            future = self.engine.import_request(number, moved)
        if future.done():
            error = future.result().error
            raise RecordingError(f"request {event.request_id} was served, but now: {error}")
        watch_as_recorded(self.engine.requests.get(event.request_id), params, text_end)

    def _check_counters(self) -> None:
        recorded = self._recording.counters
        if recorded is None:
            return
        stats = self.engine.stats()
        for name in COUNTERS:
            if stats[name] != recorded[name]:
                raise RecordingError(
                    f"every plan is as recorded, but {name} is {stats[name]} instead of "
                    f"{recorded[name]} at the end."
                )


class _RecordedTokens:
    """Hands back what each step sampled."""

    def __init__(self, recording: Recording) -> None:
        events = recording.events
        self._resolved = {event.step: event for event in events if isinstance(event, Resolved)}

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        """The recorded tokens; one zero a row for a step that was never resolved, and for a plan of
        another size, which the comparison is about to find."""
        resolved = self._resolved.get(plan.step)
        if resolved is not None and resolved.error is not None:
            raise RuntimeError(resolved.error)
        counts = np.ones(plan.num_rows, dtype=np.int32)
        if resolved is not None and resolved.counts is not None:
            counts = np.array(resolved.counts, dtype=np.int32)
        if resolved is None or len(counts) != plan.num_rows or counts.sum() != len(resolved.tokens):
            ones = np.ones(plan.num_rows, dtype=np.int32)
            return np.zeros(plan.num_rows, dtype=np.int32), ones
        return np.array(resolved.tokens, dtype=np.int32), counts

    def drafts(self, plan: StepPlan) -> IntArray | None:
        """The recorded ones; None for a plan of another size."""
        resolved = self._resolved.get(plan.step)
        if resolved is None or resolved.drafts is None or len(resolved.drafts) != plan.num_rows:
            return None
        return np.array(resolved.drafts, dtype=np.int32)


class _PlanComparer(EngineListener):
    """Compares each plan with the recorded one."""

    def __init__(self, blocks: KVBlockAllocator) -> None:
        self._blocks = blocks
        self.expected: Launched | None = None

    def launched(self, plan: StepPlan | None) -> None:
        expected, self.expected = self.expected, None
        assert expected is not None  # one for each launch
        if plan is None or expected.step is None:
            if plan is not None:
                raise RecordingError(f"step {plan.step} is planned where none was recorded.")
            if expected.step is not None:
                raise RecordingError(f"step {expected.step} was recorded, but none is planned.")
            return
        cached = int(cached_tokens(plan).sum()), self._blocks.cached
        if cached != expected.cached:
            raise RecordingError(
                f"step {plan.step} differs from the recording: requests found {cached[0]} tokens "
                f"in the cache and it keeps {cached[1]} blocks, instead of {expected.cached[0]} "
                f"and {expected.cached[1]}: replay it with the version that recorded it."
            )
        pairs = zip(PLAN_FIELDS, plan_checksums(plan), expected.checksums, strict=True)
        for name, found, recorded in pairs:
            if found != recorded:
                raise RecordingError(
                    f"step {plan.step} differs from the recording, first in {name!r}: the plan has "
                    f"{plan.num_decode} decode rows and {plan.num_rows - plan.num_decode} chunks. "
                    f"`--until-step {max(plan.step - 1, 0)}` shows the state before it."
                )

    def check_seen(self) -> None:
        """Raise unless the launch came to a plan, or to none."""
        if self.expected is not None:
            raise RecordingError(
                f"step {self.expected.step} was recorded, but the engine must resolve one first."
            )


def _check_config(recorded: InferenceConfig, given: InferenceConfig) -> None:
    for name, value in _plan_settings(given):
        if value != getattr(recorded, name):
            raise RecordingError(
                f"{name}={value!r}, but the run was recorded with {getattr(recorded, name)!r}: "
                "samples belong to the plans they were made for, so leave the setting as it was."
            )


def _plan_settings(config: InferenceConfig) -> Iterator[tuple[str, object]]:
    for name, value in asdict(config).items():
        is_unset_pool = name in POOLS and value is None
        if name not in WITHOUT_EFFECT and not is_unset_pool:
            yield name, value


COLUMNS = (
    "slot", "request", "generation", "state", "rank", "prompt", "known", "at least", "at most",
    "limit",
)  # fmt: skip
WIDTH = 16


def describe_state(engine: DynamicInferenceEngine) -> str:
    """Slots with their requests, lengths and blocks, waiting requests, and steps in flight."""
    context = engine.context
    slots, blocks = context.slots, context.blocks
    used = np.flatnonzero(slots.state != SlotState.FREE)
    lines = [
        f"step {engine.statistics.steps - 1} is planned; {len(used)} of {slots.capacity} slots and "
        f"{blocks.total - blocks.allocatable} of {blocks.total} blocks are taken",
        "".join(f"{name:>{WIDTH}}" for name in COLUMNS) + "  blocks",
        *(_slot_line(slots, int(slot)) for slot in used),
        "in flight: " + (", ".join(_step(engine, i) for i in range(len(engine.in_flight))) or "-"),
        "waiting: " + (", ".join(_waiting(engine)) or "-"),
    ]
    return "\n".join(lines)


def _slot_line(slots: RequestSlots, slot: int) -> str:
    cells = (
        slot,
        slots.request_id[slot],
        slots.generation[slot],
        SlotState(slots.state[slot]).name,
        slots.rank[slot],
        slots.prompt_length[slot],
        slots.num_known[slot],
        slots.at_least(slot),
        slots.at_most(slot),
        slots.max_length[slot],
    )
    table = slots.blocks_of(slot)
    return "".join(f"{cell!s:>{WIDTH}}" for cell in cells) + "  " + " ".join(map(str, table))


def _step(engine: DynamicInferenceEngine, index: int) -> str:
    plan = engine.in_flight[index].plan
    chunks = plan.num_rows - plan.num_decode
    return f"step {plan.step} ({plan.num_decode} decode rows, {chunks} chunks)"


def _waiting(engine: DynamicInferenceEngine) -> list[str]:
    waiting = engine.context.waiting.in_order()
    return [f"request {w.request_id} ({w.num_known} tokens)" for w in waiting]
