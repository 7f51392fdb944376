"""References for an engine's tokens: plain computations in float32."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, override

import torch
from torch import Tensor

from megatron_async.checkpoints import load_model
from megatron_async.config import InferenceConfig
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.step.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_async.step.text_generation_controller import (
    TextGenerationController,
)


class Reference(Protocol):
    """A reference for an engine's tokens."""

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """`tokens` greedy tokens for each prompt."""
        ...

    def last_logits(self, tokens: list[int]) -> Tensor:
        """Logits after `tokens`: float32 `[vocabulary]` on the CPU."""
        ...


class LogitsKeeper(GPTInferenceWrapper):
    """Keeps the logits of the step that ran last."""

    logits: Tensor

    @override
    def forward(self, view: Any) -> Tensor:
        self.logits = super().forward(view)
        return self.logits


class EngineReference(Reference):
    """The engine itself, serial, in float32, in a process of its own (models of one process share
    their parallel groups).

    Args:
        model_name: anything that `LLM` loads.
        device: "cpu" or "cuda".
        weight_dtype: weights are rounded to it.
        config: lookahead 0, with room for all requests. No step is captured: of a step that is
            replayed nothing is kept.
    """

    @override
    def __init__(
        self, model_name: str, device: str, weight_dtype: torch.dtype, config: InferenceConfig
    ) -> None:
        model = load_model(model_name, torch.float32, torch.device(device)).model
        round_weights(model, weight_dtype)
        context = DynamicInferenceContext(model.config, replace(config, num_cuda_graphs=0))
        self._wrapper = LogitsKeeper(model, context)
        self._engine = DynamicInferenceEngine(TextGenerationController(self._wrapper), context)

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return generated(self._engine.generate(prompts, greedy_params(tokens)))

    def last_logits(self, tokens: list[int]) -> Tensor:
        """Logits after `tokens`, by prefilling them as a prompt."""
        generated(self._engine.generate([tokens], greedy_params(1)))
        return self._wrapper.logits[-1].to("cpu", torch.float32)


class TransformersReference(Reference):
    """`transformers`, in float32, with weights rounded to `weight_dtype`: a plain loop with a KV
    cache."""

    @override
    def __init__(self, model_name: str, device: str, weight_dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        from megatron_async.checkpoints.convert import convert

        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "model"
            convert(model_name, folder, to="huggingface", progress=False)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model: Any = model.to(device).eval()
        self._device = device
        round_weights(self._model, weight_dtype)

    @torch.inference_mode()
    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        outputs = []
        for prompt in prompts:
            ids, cache, output = torch.tensor([prompt], device=self._device), None, []
            for _ in range(tokens):
                result = self._model(ids, past_key_values=cache, use_cache=True)
                cache, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)
                output.append(int(ids))
            outputs.append(output)
        return outputs

    @torch.inference_mode()
    @override
    def last_logits(self, tokens: list[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self._device)
        return self._model(ids).logits[0, -1].to("cpu", torch.float32)


def round_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give float32 weights the values that they have in `dtype`."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.to(dtype))


def greedy_params(tokens: int) -> SamplingParams:
    """Exactly `tokens` greedy tokens."""
    return SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, termination_id=-1)


def generated(requests: Any) -> list[list[int]]:
    """The tokens of finished requests; a failed one raises its error."""
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.generated_tokens for request in requests]
