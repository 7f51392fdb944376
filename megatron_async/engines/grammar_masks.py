"""Give steps that await masks their masks, row by row, as soon as the tokens before are known."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.text_generation_controllers.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)


def send_masks(
    in_flight: Iterable[LaunchedStep],
    slots: RequestSlots,
    requests: RequestRegistry,
    controller: TextGenerationController,
) -> None:
    """Launch the sampling of every constrained row in flight whose earlier tokens are booked.

    Called after every launch and every resolve. So the mask of a request with one sample in flight
    has been sent, and the request may be in the next step: no row waits for another row's mask. The
    samples of a step are copied when all of its rows are sampled; rows of ended requests need no
    mask.

    Args:
        in_flight: launched steps, oldest first.
        slots: the state of requests by slot.
        requests: has the grammars.
        controller: launches.
    """
    for step in in_flight:
        if not step.awaits_masks:
            continue
        plan, rows = step.plan, step.unsampled_rows
        rows = rows[slots.generation[plan.slots[rows]] == plan.generations[rows]]
        is_known = slots.num_known[plan.slots[rows]] == plan.kv_at_most[rows]
        step.unsampled_rows, rows = rows[~is_known], rows[is_known]
        if len(rows):
            masks = controller.masks_for(step, rows)
            for slot, mask in zip(plan.slots[rows], masks, strict=True):
                request_id = int(slots.request_id[slot])
                grammar = requests.get(request_id).grammar
                assert grammar is not None, "its feature says that it has one"
                grammar.mask(mask)
                if grammar.is_too_slow:
                    requests.is_too_slow(request_id)
        is_last = len(step.unsampled_rows) == 0
        if is_last or len(rows):
            controller.sample_constrained(step, len(rows), is_last=is_last)
