"""Drafting: each step proposes speculative tokens, which the next step verifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from megatron_async.config import InferenceConfig
from megatron_async.device_state.bookkeeping_layout import TOKENS
from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.errors import ConfigurationError
from megatron_async.step.mtp_drafter import MtpDrafter
from megatron_async.step.ngram_drafter import NgramDrafter

if TYPE_CHECKING:
    from megatron_async.step.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron_async.step.token_sampler import TokenSampler


class Drafter(Protocol):
    """Proposes tokens. Proposals never change a token of the output, only how many tokens a step
    yields (`device_state/feed_back.py`)."""

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        """Drafts of a step's rows, after its `feed_back`: launched work on the compute stream, and
        a part of captured steps. It must not wait, and may depend only on shapes and on device
        memory.

        Args:
            view: the step; `view.slots.length` and `view.slots.last_token` are up to date.
            count: drafts of a row.

        Returns:
            int64 `[rows, count]`, on the device; -1 from the first missing draft on.
        """
        ...


class Drafting:
    """The last part of a step, in engines with a drafter.

    Args:
        drafter: proposes.
        count: drafts of a row.

    Attributes:
        drafter: as given; benchmarks wrap it.
    """

    def __init__(self, drafter: Drafter, count: int) -> None:
        self.drafter = drafter
        self._count = count

    def draft(self, view: ContextGPUView) -> None:
        """Store drafts by slot, for the next step, and in the sample rings, for the host and other
        pipeline stages."""
        step = view.step
        drafts = self.drafter.propose(view, self._count)
        view.ops.store_drafts(
            drafts,
            step.row_slots,
            step.entry,
            view.slots.drafts,
            view.sample_ring,
            view.host_samples,
            TOKENS + view.config.decode_width,
        )


def make_drafting(
    drafter: Drafter | None,
    config: InferenceConfig,
    model: GPTInferenceWrapper,
    sampler: TokenSampler,
) -> Drafting | None:
    """The drafting of an engine.

    Args:
        drafter: that was passed in, or None.
        config: settings; its `speculative_method` names a drafter of ours.
        model: of the engine.
        sampler: of the engine.

    Raises:
        ConfigurationError: a drafter without `num_speculative_tokens`, `num_speculative_tokens`
            without a drafter, or two drafters.
    """
    count, method = config.num_speculative_tokens, config.speculative_method
    if method is not None and drafter is not None:
        raise ConfigurationError(
            f"a drafter was given beside speculative_method={method!r}: give one of the two."
        )
    if method == "ngram":
        drafter = NgramDrafter()
    if method == "mtp":
        drafter = MtpDrafter(model, sampler)
    if drafter is None and count == 0:
        return None
    if drafter is None:
        raise ConfigurationError(
            f"num_speculative_tokens={count} needs a drafter: set speculative_method='ngram', or "
            "'mtp', or pass one to TextGenerationController, or leave num_speculative_tokens 0."
        )
    if count == 0:
        raise ConfigurationError(
            "a drafter was given, but num_speculative_tokens=0: set it to the number of tokens "
            "that are drafted for a row."
        )
    return Drafting(drafter, count)
