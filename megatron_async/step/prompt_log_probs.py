"""Log probs of prompt tokens, chunk by chunk, in the steps that prefill them.

Such a step projects the hidden state of every chunk token to the vocabulary; other steps project
only each row's last hidden state. The step runs eagerly. It overlaps like other steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.devices import Device, makes_ordinary_tensors
from megatron_async.ops.sampling.slot_records import MAX_TOP_N, OUT_WORDS
from megatron_async.planning.step_plan import IntArray, StepPlan
from megatron_async.step.gpt_inference_wrapper import GPTInferenceWrapper

SLICE = 256
"""Tokens whose logits are in memory together."""


class PromptEntry:
    """One ring entry: written by a step, copied to the host, read at resolve. Its memory is
    allocated for the first step that needs it; most engines never need it.

    Args:
        capacity: prefill tokens of the largest step.
        device: supplies the memory.
    """

    def __init__(self, capacity: int, device: Device) -> None:
        self._capacity = capacity
        self._device = device
        self.source = torch.empty(0, OUT_WORDS, dtype=torch.int32)
        self._host = self.source
        self.array: IntArray = self.source.numpy()  # sync-ok: host memory

    @makes_ordinary_tensors
    def allocate(self) -> None:
        """Take the memory, unless it is there."""
        if len(self.source):
            return
        shape = self._capacity, OUT_WORDS
        target = self._device.torch_device
        self.source = torch.zeros(shape, dtype=torch.int32, device=target)
        self._host = self._device.host_buffer(shape[0] * shape[1], torch.int32).view(shape)
        self.array = self._host.numpy()  # sync-ok: host memory
        self._device.fence()

    def transfer(self, count: int) -> None:
        """Copy the first `count` rows to the host; launched work of the copy stream."""
        self._host[:count].copy_(self.source[:count], non_blocking=True)


class PromptLogProbs:
    """Computes log probs of prompt tokens after a step's forward pass.

    Args:
        model: for its context and its projection.
        device: where it runs.

    Attributes:
        ring: an entry for each step in flight.
    """

    def __init__(self, model: GPTInferenceWrapper, device: Device) -> None:
        self._model = model
        context = model.inference_context
        self._view = context.gpu_view
        self.ring = [PromptEntry(context.max_tokens, device) for _ in self._view.sample_ring]

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> None:
        """Fill the step's entry: for each token of the plan's `prompt_log_prob_chunks`, one chunk
        after another, the log prob of the next token. Runs inside launched work."""
        view, first = self._view, plan.first_prefill_token
        out = self.ring[plan.step % len(self.ring)].source
        words = view.bookkeeping[plan.step % len(view.bookkeeping)]
        following = view.prefill_following(words)
        end = 0
        for chunk in plan.features.prompt_log_prob_chunks:
            span = slice(
                first + int(plan.prefill_starts[chunk]), first + int(plan.prefill_starts[chunk + 1])
            )
            targets = torch.cat((view.step.token_ids[span][1:], following[chunk : chunk + 1]))
            hidden = view.hidden_states[span]
            for start in range(0, len(targets), SLICE):
                part = slice(start, min(start + SLICE, len(targets)))
                logits = self._model.project(hidden[part])
                rows = out[end + part.start :]
                write_prompt_log_probs(logits, targets[part], plan.features.prompt_top_n, rows)
            end += len(targets)


def write_prompt_log_probs(logits: Tensor, targets: Tensor, top_n: int, out: Tensor) -> None:
    """Log probs of `targets`, and the likeliest tokens.

    Args:
        logits: `[tokens, vocabulary]`.
        targets: int64 `[tokens]`; one that is negative gets a meaningless value.
        top_n: likeliest tokens, at most `MAX_TOP_N`; a sort of the vocabulary, if any.
        out: int32 `[tokens or more, OUT_WORDS]`, written as by `ops.sampling.log_probs`.
    """
    count, top_n = len(targets), min(top_n, logits.size(1))
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    floats = out.view(torch.float32)
    floats[:count, 0] = log_probs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    if top_n == 0:
        return
    # Stable, so that equal ones are in the order of their ids, here and on a GPU.
    values, ids = torch.sort(log_probs, dim=-1, descending=True, stable=True)
    out[:count, 1 : 1 + top_n] = ids[:, :top_n].int()
    floats[:count, 1 + MAX_TOP_N : 1 + MAX_TOP_N + top_n] = values[:, :top_n]
