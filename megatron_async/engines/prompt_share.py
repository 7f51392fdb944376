"""`PromptShare`: how many prompt tokens a step may have beside running requests.

Running requests wait for the prompts of each step. With the products of few tokens a GPU is bound
by the weights' bytes, so some prompt tokens beside them cost little; from some hundred on, each
token costs its products, and a step with a long prompt takes several times as long as others. Such
a prompt is prefilled in several steps (chunked prefill as in Sarathi-Serve, OSDI 2024). How many
tokens a step has then is measured when steps are captured.

Smaller chunks mean a later first token, and fewer tokens a second where requests arrive faster than
they are served. So the more prompt tokens wait, the more a step may have: half of them.
"""

from __future__ import annotations

import numpy as np

from megatron_async.captured_steps.graph_shapes import LEAST_PREFILL_TOKENS
from megatron_async.contexts.dynamic_context import DynamicInferenceContext

SHARE = 0.5
"""Of the prompt tokens that wait, a step may have so many, whatever it takes."""


class PromptShare:
    """Limits prompt tokens of steps that have decode rows.

    Args:
        context: of the engine.
    """

    def __init__(self, context: DynamicInferenceContext) -> None:
        self._context = context

    def limit(self) -> int:
        """Most prompt tokens of the next step, if it has decode rows; at least
        `LEAST_PREFILL_TOKENS`, or `mixed_step_tokens` where these are fewer. While no prompt waits,
        the limit stays what it is."""
        context, slots, scheduler = self._context, self._context.slots, self._context.scheduler
        config, shapes = context.config, context.graph_shapes
        tokens = config.mixed_step_tokens or shapes.mixed_step_tokens
        if tokens is None or not config.enable_chunked_prefill:
            return scheduler.prefill_limit
        started = scheduler.prefilling
        waits = context.waiting.num_known
        if started:
            waits += int((slots.num_known[started] - slots.num_prefilled[started]).sum())
        if not waits:
            return scheduler.prefill_limit
        rows = -(-np.count_nonzero(slots.may_decode()) // slots.num_micro_batches)
        decode = int(rows) * slots.max_width
        least = min(LEAST_PREFILL_TOKENS, tokens)
        room = max(tokens - decode, SHARE * waits)
        return min(shapes.prefill_that_fits(decode, room, least), config.max_tokens)
