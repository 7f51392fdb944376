"""An engine's books as text, for people who look for a bug."""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.request_slots import RequestSlots, SlotState
from megatron_async.engines.dynamic_engine import DynamicInferenceEngine

COLUMNS = (
    "slot", "request", "generation", "state", "rank", "prompt", "known", "at least", "at most",
    "limit",
)  # fmt: skip
WIDTH = 16


def describe_state(engine: DynamicInferenceEngine) -> str:
    """Slots with their requests, lengths and blocks, who waits, and what is in flight."""
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
    table = slots.block_table[slot, : slots.num_blocks[slot]]
    return "".join(f"{cell!s:>{WIDTH}}" for cell in cells) + "  " + " ".join(map(str, table))


def _step(engine: DynamicInferenceEngine, index: int) -> str:
    plan = engine.in_flight[index].plan
    chunks = plan.num_rows - plan.num_decode
    return f"step {plan.step} ({plan.num_decode} decode rows, {chunks} chunks)"


def _waiting(engine: DynamicInferenceEngine) -> list[str]:
    waiting = engine.context.waiting.in_order()
    return [f"request {w.request.request_id} ({w.num_known} tokens)" for w in waiting]
