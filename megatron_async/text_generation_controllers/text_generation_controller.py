"""`TextGenerationController`: the device work of one step, from its bookkeeping to its samples."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_async.contexts.step_plan import IntArray, StepPlan
from megatron_async.devices import Event
from megatron_async.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_async.ops.sampling import SamplingMode, sample_reference


class ControllerTokenizer(Protocol):
    """What the engine asks of a tokenizer: Megatron-Core's names."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def detokenize(self, ids: list[int]) -> str:
        """Text of token ids."""
        ...


class LaunchedStep:
    """A step in flight: its plan, where its samples arrive, and the event that says they have.

    Attributes:
        plan: immutable.
        samples: int32 `[rows]`, host memory; valid once `ready` is reached and until the ring comes
            round (the step's resolve reads it before).
        ready: reached when the samples are on the host.
        error: exception that the step's own work raised; read it after `ready`.
    """

    def __init__(self, plan: StepPlan, samples: IntArray, ready: Event) -> None:
        self.plan = plan
        self.samples = samples
        self.ready = ready
        self.error: Exception | None = None


class _SampleBuffers:
    """One ring entry. Device side: written by the step, read by the copy; host side: written by the
    copy, read at resolve. An entry is used again only after the host has resolved its last step."""

    def __init__(self, max_rows: int, context: Any) -> None:
        device = context.device
        self.device = torch.zeros(max_rows, dtype=torch.int32, device=device.torch_device)
        self.host = device.host_buffer(max_rows, torch.int32)
        self.array = self.host.numpy()  # sync-ok: host memory
        self.sampled = device.event()
        self.ready = device.event()


class TextGenerationController:
    """Runs steps on the device. It never decides who runs and never waits.

    Args:
        inference_wrapped_model: the model, wrapped for its context.
        tokenizer: for text prompts and texts out; None serves token ids only.
    """

    def __init__(
        self,
        inference_wrapped_model: GPTInferenceWrapper,
        tokenizer: ControllerTokenizer | None = None,
    ) -> None:
        self.inference_wrapped_model = inference_wrapped_model
        self.tokenizer = tokenizer
        self.context = inference_wrapped_model.inference_context
        self.vocab_size = inference_wrapped_model.vocab_size
        self.device = self.context.device
        self.tracer = self.context.tracer
        self._ring = [
            _SampleBuffers(self.context.max_requests, self.context)
            for _ in range(self.context.config.steps_in_flight)
        ]
        self.device.fence()

    def launch_step(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue a step whose bookkeeping is on its way: forward, sampling, sample copy.

        Nothing here waits. What the step's own work raises is kept in the result's `error`.
        """
        buffers = self._ring[plan.step % len(self._ring)]
        launched = LaunchedStep(plan, buffers.array[: plan.dims.rows], buffers.ready)
        compute, copy = self.device.compute, self.device.copy
        compute.launch(partial(self._run_guarded, launched, buffers))
        compute.record(buffers.sampled)
        copy.wait(buffers.sampled)
        copy.launch(partial(self._transfer_samples_to_cpu, plan, buffers))
        copy.record(buffers.ready)
        return launched

    def _run_guarded(self, launched: LaunchedStep, buffers: _SampleBuffers) -> None:
        try:
            self._run_step(launched.plan, buffers)
        except Exception as error:
            launched.error = error

    @torch.inference_mode()
    def _run_step(self, plan: StepPlan, buffers: _SampleBuffers) -> None:
        """The step's device work, on the compute stream."""
        view, tracer = self.context.gpu_view, self.tracer
        start = tracer.mark(self.device.compute)
        with tracer.range("device_step", plan.step):
            with tracer.range("forward_pass", plan.step):
                view.begin_step(plan.dims)
                logits = self.inference_wrapped_model.forward(view)
            forwarded = tracer.mark(self.device.compute)
            with tracer.range("sampling", plan.step):
                sampled = self._sample(logits, plan.sampling_mode)
                view.feed_back(sampled)
                buffers.device[: plan.dims.rows].copy_(sampled)
        end = tracer.mark(self.device.compute)
        tracer.device_span("device_step", plan.step, start, end)
        tracer.device_span("forward_pass", plan.step, start, forwarded)
        tracer.device_span("sampling", plan.step, forwarded, end)

    def _sample(self, logits: Tensor, mode: SamplingMode) -> Tensor:
        greedy = mode == SamplingMode.GREEDY
        params = None if greedy else self.context.gpu_view.sampling_tensors()
        return sample_reference(logits, params, mode)

    def _transfer_samples_to_cpu(self, plan: StepPlan, buffers: _SampleBuffers) -> None:
        rows = plan.dims.rows
        with self.tracer.range("transfer_samples_to_cpu", plan.step):
            buffers.host[:rows].copy_(buffers.device[:rows], non_blocking=True)

    # ---- Text --------------------------------------------------------------------------------

    def tokenize_prompt(self, prompt: str, add_bos: bool = False) -> list[int]:
        """Token ids of a text prompt.

        Args:
            prompt: the text.
            add_bos: put the tokenizer's beginning-of-sequence token first, if it is not there.

        Raises:
            ValueError: there is no tokenizer, or it has no such token.
        """
        if self.tokenizer is None:
            raise ValueError(
                "a text prompt needs a tokenizer and this model has none: give token ids, or a "
                "tokenizer folder."
            )
        tokens = list(self.tokenizer.tokenize(prompt))
        if add_bos:
            bos = getattr(self.tokenizer, "bos", None)
            if bos is None:
                raise ValueError(
                    "add_BOS=True, but the tokenizer has no beginning-of-sequence token: leave "
                    "add_BOS False."
                )
            if tokens[:1] != [bos]:
                tokens.insert(0, bos)
        return tokens

    def detokenize(self, tokens: list[int]) -> str | None:
        """Text of token ids; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.detokenize(tokens)
