"""`TextGenerationController` as Megatron's scripts use it."""

from __future__ import annotations

from typing import Any

from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    DecodeOnly,
)

from megatron_async.compat.conversions.requests import detokenize, tokenize_prompt
from megatron_async.compat.conversions.sampling import SamplingSeed
from megatron_async.errors import ConfigurationError
from megatron_async.step.drafting import Drafter
from megatron_async.step.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_async.step.text_generation_controller import (
    TextGenerationController as OwnController,
)

__all__ = ["DecodeOnly", "TextGenerationController"]


class TextGenerationController(OwnController):
    """Our controller with Megatron's text functions.

    Args:
        inference_wrapped_model: the model, wrapped for its context.
        tokenizer: Megatron's, ours, or any with `tokenize`, `detokenize`, `bos` and `eod`; None
            serves token ids only.
        drafter: of our controller.

    Raises:
        ConfigurationError: the configuration's process groups are not the model's.
    """

    # Megatron's take the tokenizer as their first argument, and are functions of the class.
    tokenize_prompt = staticmethod(tokenize_prompt)  # type: ignore[assignment]
    detokenize = staticmethod(detokenize)

    def __init__(
        self,
        inference_wrapped_model: GPTInferenceWrapper,
        tokenizer: Any = None,
        drafter: Drafter | None = None,
    ) -> None:
        _check_groups(inference_wrapped_model)
        super().__init__(inference_wrapped_model, tokenizer, drafter)
        self.model_config = inference_wrapped_model.inference_context.model_config
        self.num_speculative_tokens = self.context.config.num_speculative_tokens
        self.sampling_rng = SamplingSeed(self.context.config)


def _check_groups(wrapper: GPTInferenceWrapper) -> None:
    """Refuse `InferenceConfig.pg_collection` where the model computes over other groups."""
    given = getattr(wrapper.inference_context.config, "pg_collection", None)
    own = getattr(wrapper.model, "pg_collection", None)
    if given is None or own is None:
        return
    for name in ("tp", "pp", "ep"):
        asked, has = getattr(given, name, None), getattr(own, name, None)
        if asked is None or has is None or asked is has:
            continue
        if asked.size() != has.size():
            raise ConfigurationError(
                f"InferenceConfig.pg_collection.{name} has {asked.size()} ranks, but the model's "
                f"own has {has.size()}: give the model's pg_collection, or None."
            )
