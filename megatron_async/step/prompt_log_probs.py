"""Log probs of prompt tokens, chunk by chunk, behind the steps that prefill them.

Such a step's hidden states are projected to the vocabulary wherever a log prob is wanted; of other
steps only each row's last one is. That is work of its own behind the step, which is captured like
any other. The log softmax is the one of generated tokens (`ops/sampling/log_probs.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.device_state.bookkeeping_layout import BookkeepingLayout
from megatron_async.devices import Device, makes_ordinary_tensors
from megatron_async.ops.sampling.logits_processing import ProcessingRows
from megatron_async.ops.sampling.sampling import FilterCuts, SamplingMode
from megatron_async.ops.sampling.slot_records import OUT_WORDS, RowFeature
from megatron_async.planning.step_plan import IntArray, StepPlan
from megatron_async.step.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_async.step.token_sampler import TokenSampler

SLICE = 256
"""Tokens whose logits are in memory together. Rows of a slice begin at multiples of 16 bytes: on a
GPU the kernels are those of captured steps."""


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
        sampler: for what processed logits depend on.
        device: where it runs.

    Attributes:
        ring: an entry for each step in flight.
    """

    def __init__(self, model: GPTInferenceWrapper, sampler: TokenSampler, device: Device) -> None:
        self._model = model
        self._sampler = sampler
        context = model.inference_context
        self._view = context.gpu_view
        self.ring = [PromptEntry(context.max_tokens, device) for _ in self._view.sample_ring]

    @torch.inference_mode()
    def compute(self, plan: StepPlan, hidden_states: Tensor) -> None:
        """Fill the step's entry: for each token of the plan's `prompt_spans`, one after another,
        the log prob of the next token. Runs inside launched work.

        Args:
            plan: of the step that ran last.
            hidden_states: `[tokens, hidden]` of the step, after the last norm.
        """
        view, first, spans = self._view, plan.first_prefill_token, plan.features.prompt_spans
        # Of the bookkeeping, because a replayed graph leaves the view as it was.
        words = view.bookkeeping[plan.step % len(view.bookkeeping)]
        fields = BookkeepingLayout.for_batch(plan.dims, 0).views(words)
        ids, following = fields["prefill_token_ids"], fields["prefill_following"]
        owners = fields["row_slots"][plan.dims.decode_rows :]
        hidden, targets, slots, features = [], [], [], []
        for chunk, start, end, bits in spans:
            ends_chunk = end == int(plan.prefill_starts[chunk + 1])
            hidden.append(hidden_states[first + start : first + end])
            targets.append(ids[start + 1 : end if ends_chunk else end + 1])
            if ends_chunk:
                targets.append(following[chunk : chunk + 1])
            slots.append(owners[chunk : chunk + 1].expand(end - start))
            features.append(ids.new_full((end - start,), bits))
        rows = self._rows(torch.cat(slots).long(), torch.cat(features))
        states, tokens = torch.cat(hidden), torch.cat(targets).long()
        for at in range(0, len(tokens), SLICE):
            self._write(plan, states, tokens, rows, slice(at, min(at + SLICE, len(tokens))))

    def _rows(self, slots: Tensor, features: Tensor) -> ProcessingRows:
        # No bit of these rows heeds a position, or what came before.
        positions, memory = torch.zeros_like(features), self._sampler.state.memory
        return ProcessingRows(slots, positions, self._view.slots.records, features, memory)

    def _write(
        self, plan: StepPlan, hidden: Tensor, tokens: Tensor, rows: ProcessingRows, part: slice
    ) -> None:
        """Log probs of a slice, to the same rows of the step's entry."""
        ops, count = self._view.ops, part.stop - part.start
        out = self.ring[plan.step % len(self.ring)].source
        rows = ProcessingRows(
            rows.slots[part], rows.positions[part], rows.records, rows.features[part], rows.memory
        )
        logits = self._model.project(hidden[part])
        floats = logits.new_empty(1, 1, dtype=torch.float32)  # not read where all are raw
        cuts = FilterCuts(floats[0], rows.features, floats[0])
        bits = [span.features for span in plan.features.prompt_spans]
        if any(each & RowFeature.PROCESSED_LOG_PROBS for each in bits):
            floats = logits.new_empty(logits.shape, dtype=torch.float32)
            floats = ops.process_logits(logits, rows, floats, logits)
            cuts = ops.sample(floats, rows, SamplingMode.FILTERED)[1] or cuts
        ring = out.as_strided(
            (1, count, OUT_WORDS), (SLICE * OUT_WORDS, OUT_WORDS, 1), part.start * OUT_WORDS
        )
        entry = rows.features.new_zeros(1)
        ops.log_probs(logits, floats, tokens[part], cuts, rows, ring, entry)
