"""Make requests say given tokens, and keep what the model would have said ("teacher forcing").

So two engines are compared over many decode steps although one other token would part them for
good.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_async.config import InferenceConfig
from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
from megatron_async.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_async.parity.references import generated, greedy_params
from megatron_async.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)


class ForcedTokens(GPTInferenceWrapper):
    """Gives the sampler logits in which the token to be said is the largest.

    Args:
        model: on one rank.
        context: its steps run eagerly.
        sequences: int64 `[requests, tokens]`: of the request in each slot, its prompt first.
        prompt_tokens: length of every prompt.

    Attributes:
        log_probs: float32 `[requests + 1, tokens - prompt_tokens, vocabulary]` on the device: of
            each forced token's place. The last row is for rows of no request.
    """

    def __init__(
        self,
        model: nn.Module,
        context: DynamicInferenceContext,
        sequences: Tensor,
        prompt_tokens: int,
    ) -> None:
        super().__init__(model, context)
        device = context.device.torch_device
        self._prompt_tokens = prompt_tokens
        self._sequences = nn.functional.pad(sequences, (0, 0, 0, 1)).to(device)
        requests, tokens = self._sequences.shape
        shape = requests, tokens - prompt_tokens, self.vocab_size
        self.log_probs = torch.empty(shape, dtype=torch.float32, device=device)

    def forward(self, view: ContextGPUView) -> Tensor:
        """Logits as `GPTInferenceWrapper.forward` gives them; their log probs are kept."""
        logits = super().forward(view)
        slots, positions = view.step.slots, view.step.sample_positions.long()
        # A chunk that ends inside its prompt writes what a later one writes again.
        steps = (positions - self._prompt_tokens).clamp(min=0)
        self.log_probs[slots, steps] = logits.float().log_softmax(-1)
        forced = self._sequences[slots, positions]
        return torch.zeros_like(logits).scatter_(1, forced[:, None], 1.0)


def forced_log_probs(
    model: nn.Module, sequences: Tensor, prompt_tokens: int, config: InferenceConfig
) -> Tensor:
    """Log probs of all tokens after the prompts: prompts are prefilled, later tokens are decoded.

    Args:
        model: a `HybridModel` on one rank, on the device of `config`.
        sequences: int64 `[requests, tokens]` on the CPU.
        prompt_tokens: so many of each are its prompt, at least 1 and less than all.
        config: serial, without graphs, with as many slots as there are requests.

    Returns:
        float32 `[requests, tokens - prompt_tokens, vocabulary]` on the model's device. Those of the
        first place come from prefill, the others from decode steps.

    Raises:
        RuntimeError: a request failed, or did not say its tokens.
    """
    context = DynamicInferenceContext(model.config, config)
    wrapper = ForcedTokens(model, context, sequences, prompt_tokens)
    engine = DynamicInferenceEngine(TextGenerationController(wrapper), context)
    prompts = [row[:prompt_tokens].tolist() for row in sequences]
    said = generated(engine.generate(prompts, greedy_params(sequences.size(1) - prompt_tokens)))
    engine.close()
    if said != sequences[:, prompt_tokens:].tolist():
        raise RuntimeError("a request did not say the tokens forced on it: slots are not in order.")
    return wrapper.log_probs[: len(sequences)]
