"""Forced text: requests say given tokens, whatever the model would have said.

Random weights say nothing that can be looked up, so what a drafter is worth on a real text cannot
be measured with them alone. Here each sample of a step is replaced by the token of a given text at
its position; drafts are then accepted where they agree with that text. **The tokens that come out
are not the model's**; the step's own work stays as it is, but for two small kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_async.device_state.gpu_view import ContextGPUView
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
    from megatron_async.ops.sampling.sampling import SamplingMode


class ForcedText:
    """Changes what an engine's sampler says; captures its graphs again.

    Args:
        engine: an idle one.

    Attributes:
        texts: int64 `[slots, max_sequence_length]` on the engine's device, changed in place by
            `say`.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        controller, view = engine.controller, engine.context.gpu_view
        self._length = engine.context.config.max_sequence_length
        last = view.slots.last_token
        self.texts = torch.zeros((len(last), self._length), dtype=torch.int64, device=last.device)
        sample = _Forced(controller.sampler.sample, view, self.texts)
        controller.sampler.sample = sample  # type: ignore[assignment]
        controller.recapture_cuda_graphs()

    def say(self, tokens: Sequence[int]) -> None:
        """From now on every request says this.

        Args:
            tokens: of prompt and answer, one after the other.

        Raises:
            ConfigurationError: more than the engine's `max_sequence_length`.
        """
        if len(tokens) > self._length:
            raise ConfigurationError(
                f"a forced text of {len(tokens)} tokens does not fit max_sequence_length="
                f"{self._length}: take a shorter text, or a larger limit."
            )
        self.texts[:, : len(tokens)] = torch.tensor(tokens, device=self.texts.device)


class _Forced:
    """A sampler's `sample`, and then the text."""

    def __init__(
        self, sample: Callable[[Tensor, SamplingMode], Tensor], view: ContextGPUView, texts: Tensor
    ) -> None:
        self._sample, self._view, self._texts = sample, view, texts

    def __call__(self, output: Tensor, mode: SamplingMode) -> Tensor:
        sampled, step = self._sample(output, mode), self._view.step
        positions = step.sample_positions.long().clamp(max=self._texts.size(1) - 1)
        sampled.copy_(self._texts[step.slots, positions])
        return sampled
