"""`PlanFeatures`: the host's work for rows of a plan beyond tokens: log probs, grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.ops.sampling.slot_records import RowFeature

if TYPE_CHECKING:
    from megatron_async.contexts.request_slots import RequestSlots
    from megatron_async.contexts.step_plan import IntArray


@dataclass(frozen=True, eq=False)
class PlanFeatures:
    """The work of the host for the rows of a step, beside booking their tokens."""

    wants_log_probs: bool = False
    """Whether a row asks for log probs of its sample."""
    prompt_log_prob_chunks: tuple[int, ...] = ()
    """Prefill chunks whose tokens' log probs are wanted."""
    num_prompt_log_probs: int = 0
    """Tokens of those chunks."""
    prompt_top_n: int = 0
    """Most alternatives that their requests want at each token."""
    constrained_rows: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Rows that produce a token with a grammar: they are sampled separately."""

    @property
    def needs_copy(self) -> bool:
        """Whether a copy brings something of the step to the host that the step does not write
        there itself: log probs, and what is sampled behind it."""
        return (
            self.wants_log_probs or self.num_prompt_log_probs > 0 or len(self.constrained_rows) > 0
        )


NO_FEATURES = PlanFeatures()
"""What every plan below the mode PROCESSED shares."""


def plan_features(
    slots: RequestSlots,
    rows: IntArray,
    produces: NDArray[np.bool_],
    chunks: Sequence[tuple[int, int, int]],
    mode: SamplingMode,
) -> PlanFeatures:
    """What the requests of a step's rows ask for.

    Args:
        slots: per-request state.
        rows: `[rows]` slots, those of the chunks last.
        produces: bool `[rows]`: whether the row's sample is a token of its request.
        chunks: slot, first token and end of each prefill chunk.
        mode: the highest among the rows.
    """
    if mode != SamplingMode.PROCESSED:
        return NO_FEATURES
    features = slots.features[rows]
    wanted = slots.prompt_log_probs
    prompts = tuple(i for i, (slot, start, _) in enumerate(chunks) if start < wanted[slot])
    params = [slots.request_at(chunks[chunk][0]).sampling_params for chunk in prompts]
    return PlanFeatures(
        wants_log_probs=bool(np.any(features & RowFeature.LOG_PROBS)),
        prompt_log_prob_chunks=prompts,
        num_prompt_log_probs=sum(chunks[chunk][2] - chunks[chunk][1] for chunk in prompts),
        prompt_top_n=max((each.top_n_logprobs for each in params), default=0),
        constrained_rows=np.flatnonzero(((features & RowFeature.CONSTRAINED) != 0) & produces),
    )
