"""Drafting: what may come next is proposed by the step itself, for the next step to verify."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron_async.config import InferenceConfig
from megatron_async.device_state.feed_back import TOKENS
from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.errors import ConfigurationError


class Drafter(Protocol):
    """Proposes tokens. What it proposes changes no token of the output, only how many come at once
    (`device_state/feed_back.py`)."""

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        """Drafts of a step's rows, behind its `feed_back`: launched work on the compute stream, and
        a part of captured steps. It must not wait, and depend on shapes and on device memory alone.

        Args:
            view: the step; `view.slots.length` and `view.slots.last_token` are up to date.
            count: drafts of a row.

        Returns:
            int64 `[rows, count]`; -1 from where on nothing is proposed.
        """
        ...


class Drafting:
    """The last part of a step where there is a drafter.

    Args:
        drafter: proposes.
        count: drafts of a row.
    """

    def __init__(self, drafter: Drafter, count: int) -> None:
        self._drafter = drafter
        self._count = count

    def draft(self, view: ContextGPUView) -> None:
        """Leave drafts for the next step, by slot, and in the sample ring, for other pipeline
        stages."""
        rows, step = view.dims.rows, view.step
        drafts = self._drafter.propose(view, self._count)
        view.slots.drafts.index_copy_(0, step.row_slots, drafts)
        first = TOKENS + view.config.decode_width
        found = view.sample_ring[:, :rows, first : first + self._count]
        found.index_copy_(0, step.entry.long(), drafts.int()[None])


def make_drafting(drafter: Drafter | None, config: InferenceConfig) -> Drafting | None:
    """The drafting of an engine.

    Raises:
        ConfigurationError: a drafter without tokens to draft, or the reverse.
    """
    count = config.num_speculative_tokens
    if drafter is None and count == 0:
        return None
    if drafter is None:
        raise ConfigurationError(
            f"num_speculative_tokens={count} needs a drafter: pass one to "
            "TextGenerationController, or leave num_speculative_tokens 0."
        )
    if count == 0:
        raise ConfigurationError(
            "a drafter was given, but num_speculative_tokens=0: set it to the number of tokens "
            "that are drafted for a row."
        )
    return Drafting(drafter, count)
