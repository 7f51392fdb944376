"""The report of a turn of the engine's loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_async.contexts.step_output import StepOutput
from megatron_async.requests.inference_request import DynamicInferenceRequest

NO_IDS = np.empty(0, dtype=np.int64)


def step_report(
    outputs: list[StepOutput], ended: list[DynamicInferenceRequest], seconds: float
) -> dict[str, Any]:
    """The mapping that `DynamicInferenceEngine.step_modern` returns, by Megatron's names.

    Args:
        outputs: of the steps that were resolved, oldest first.
        ended: requests that ended since the last report.
        seconds: that the turn took.
    """
    return {
        "outputs": outputs,
        "active_request_ids": outputs[-1].request_ids if outputs else NO_IDS,
        "finished_request_records": ended,
        "step_time": seconds,
    }
