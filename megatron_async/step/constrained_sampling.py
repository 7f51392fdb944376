"""Sample the rows that a grammar constrains, separately from the other rows of their step.

The mask of a token depends on the token before it. The host learns that token when the previous
step is resolved; by then this step's forward pass is running. So a step samples its other rows at
once, and constrained rows when their masks have arrived. `ConstrainedSampler` is this second part,
launched separately. It needs only the logits, per-slot state, and a few words sent with the masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async.device_state.bookkeeping_layout import TOKENS
from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.devices import Device, makes_ordinary_tensors
from megatron_async.ops.sampling.log_probs import empty_log_probs
from megatron_async.ops.sampling.logits_processing import ProcessingRows
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.ops.sampling.slot_records import Header, RowFeature
from megatron_async.ops.sampling.token_mask import mask_words
from megatron_async.planning.step_plan import IntArray
from megatron_async.step.token_sampler import TokenSampler

HEAD_WORDS = 4
"""Device row, row of logits, slot, position."""


@dataclass
class StepLogits:
    """Logits of a step's rows, kept until its constrained rows are sampled.

    Attributes:
        processed: float32 `[rows, vocabulary]`.
        raw: the model's own, of constrained rows.
    """

    processed: Tensor
    raw: Tensor


class MaskEntry:
    """One ring entry: rows and masks, filled by the host, copied to the device, read by the second
    part of one step. The host fills it again only after it has resolved that step. Its memory is
    allocated for the first constrained step.

    Args:
        max_rows: most rows of a step.
        vocab_size: tokens.
        device: supplies the memory.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: Device) -> None:
        self._shape = max_rows, HEAD_WORDS + mask_words(vocab_size)
        self._device = device
        self._host = torch.empty(0, 0, dtype=torch.int32)
        self.words: NDArray[np.int32] = self._host.numpy()  # sync-ok: host memory
        self.target = self._host
        self.arrived = device.event()

    @makes_ordinary_tensors
    def allocate(self) -> None:
        """Take the memory, unless it is there."""
        if self._host.numel():
            return
        rows, words = self._shape
        self._host = self._device.host_buffer(rows * words, torch.int32).view(rows, words)
        self.words = self._host.numpy()  # sync-ok: host memory
        target = self._device.torch_device
        self.target = torch.zeros(rows, words, dtype=torch.int32, device=target)
        self._device.fence()

    def fill(
        self,
        first: int,
        rows: IntArray,
        sample_rows: IntArray,
        slots: IntArray,
        positions: IntArray,
    ) -> NDArray[np.int32]:
        """Name rows, each array `[rows]`, from the entry's row `first` on; returns their masks,
        int32 `[rows, words]`, to be written."""
        found = self.words[first : first + len(rows)]
        for column, values in enumerate((rows, sample_rows, slots, positions)):
            found[:, column] = values
        return found[:, HEAD_WORDS:]

    def receive(self, part: slice) -> None:
        """Copy rows to the device; launched work."""
        self.target[part].copy_(self._host[part], non_blocking=True)

    def rows_and_slots(self, part: slice) -> tuple[Tensor, Tensor]:
        """Device rows and slots, int64, of entry rows that have been received."""
        words = self.target[part]
        return words[:, 0].long(), words[:, 2].long()


class ConstrainedSampler:
    """The second part of steps with constrained rows.

    Args:
        view: for per-slot state and the rings.
        sampler: the first part.
        vocab_size: tokens.
        device: where it runs.

    Attributes:
        ring: an entry for each step in flight.
    """

    def __init__(
        self, view: ContextGPUView, sampler: TokenSampler, vocab_size: int, device: Device
    ) -> None:
        self._view, self._sampler = view, sampler
        entries, rows, _ = view.sample_ring.shape
        self.ring = [MaskEntry(rows, vocab_size, device) for _ in range(entries)]

    def entry_of(self, step: int) -> MaskEntry:
        """The ring's entry for a step."""
        return self.ring[step % len(self.ring)]

    def keep(self, rows: int) -> StepLogits:
        """The logits of the step that has just run, which must be sampled before the next step
        runs; or, if more than two steps may be in flight, copies that no later step overwrites."""
        processed, raw = self._sampler.processed[:rows], self._sampler.kept[:rows]
        if len(self.ring) > 2:
            return StepLogits(processed.clone(), raw.clone())
        return StepLogits(processed, raw)

    @torch.inference_mode()
    def sample(self, step: int, logits: StepLogits, part: slice) -> None:
        """Sample rows of the step's entry; launched work, on the compute stream.

        Args:
            step: number of the step.
            logits: of its first part.
            part: rows of the entry that have arrived.
        """
        view, slots = self._view, self._view.slots
        words = self.entry_of(step).target[part]
        count = len(words)
        row, index, slot = (words[:, column].long() for column in range(3))
        asked = slots.records[:, Header.FEATURES].index_select(0, slot)
        asked = asked & ~int(RowFeature.CONSTRAINED) | int(RowFeature.PRODUCES)
        rows = ProcessingRows(
            slots=slot,
            positions=words[:, 3].contiguous(),
            records=slots.records,
            features=asked,
            memory=self._sampler.state.memory,
        )
        processed = logits.processed.index_select(0, index)
        ops = view.ops
        ops.apply_token_mask(processed, words[:, HEAD_WORDS:])
        tokens, cuts = ops.sample(processed, rows, SamplingMode.FILTERED)
        found = empty_log_probs(1, count, processed.device)
        entry = torch.zeros(1, dtype=torch.int32, device=processed.device)
        raw = logits.raw.index_select(0, index)
        ops.log_probs(raw, processed, tokens, cuts, rows, found, entry)
        ops.count_tokens(tokens, rows)
        self._sampler.log_probs[step % len(self.ring)].index_copy_(0, index, found[0])
        slots.last_token.index_copy_(0, slot, tokens.clamp(min=0))
        samples = view.sample_ring[step % len(self.ring), :, TOKENS]
        samples.index_copy_(0, row, tokens.int())
