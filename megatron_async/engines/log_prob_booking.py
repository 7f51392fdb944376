"""Hand the log probs of a resolved step to the requests that asked for them."""

from __future__ import annotations

import numpy as np

from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.contexts.step_output import StepOutput
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep


def book_log_probs(output: StepOutput, slots: RequestSlots) -> None:
    """Book the generated tokens' log probs: Python per token of rows that asked."""
    assert output.log_probs is not None, "no row of the step asked"
    owners = output.slots[output.rows]
    for token in np.flatnonzero(slots.features[owners] & RowFeature.LOG_PROBS):
        found = slots.request_at(owners[token]).log_probs
        assert found is not None, "its feature says that it asked"
        found.add_generated(output.log_probs[token])


def book_prompt_log_probs(step: LaunchedStep, slots: RequestSlots) -> None:
    """Book the log probs of prompt tokens that the step's chunks delivered, but for requests that
    lost their slots since."""
    plan, words, first = step.plan, step.prompt_log_probs, 0
    for chunk in plan.features.prompt_log_prob_chunks:
        row = plan.num_decode + chunk
        length = int(plan.prefill_starts[chunk + 1] - plan.prefill_starts[chunk])
        slot = plan.slots[row]
        if slots.generation[slot] == plan.generations[row]:
            found = slots.request_at(slot).log_probs
            assert found is not None, "its slot says that it asked"
            found.add_prompt(int(plan.kv_at_most[row]) - length, words[first : first + length])
        first += length
