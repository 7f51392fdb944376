"""`TokenSampler`: from a step's logits to its tokens, and to log probs if rows ask for them."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.device_state.sampling_state import SamplingState
from megatron_async.ops.ranks.vocabulary_shard import VocabularyShard
from megatron_async.ops.sampling.log_probs import empty_log_probs
from megatron_async.ops.sampling.logits_processing import ProcessingRows
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows


class TokenSampler:
    """The sampling part of a step. Its methods run inside launched work, on the compute stream, and
    are captured with it: what a row asks for is read on the device.

    Args:
        view: the running step.
        vocab_size: tokens.
        dtype: of the logits.
        shard: which columns of the logits this rank has; None: all.

    Attributes:
        state: token counts and recent tokens, for penalties and bad words, by slot.
        log_probs: int32 `[steps in flight, sample rows, OUT_WORDS]`. Written by steps of mode
            PROCESSED, read by the copy to the host, which waits for the step's event; an entry is
            written again only after the host has resolved the step that wrote it.
        processed: float32 `[sample rows, vocabulary]`: logits of the last step of mode PROCESSED,
            for `ConstrainedSampler`.
        kept: logits of its constrained rows before processing, in the model's dtype.
    """

    def __init__(
        self,
        view: ContextGPUView,
        vocab_size: int,
        dtype: torch.dtype,
        shard: VocabularyShard | None = None,
    ) -> None:
        self._view = view
        self._shard = shard
        device, rows = view.sample_ring.device, view.config.max_sample_rows
        self.state = _state_of(view, vocab_size)
        entries = len(view.sample_ring)
        self.log_probs = empty_log_probs(entries, rows, device)
        self.processed = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)
        self.kept = torch.empty(rows, vocab_size, dtype=dtype, device=device)

    def sample(self, logits: Tensor, mode: SamplingMode) -> Tensor:
        """One token for each row of logits.

        Args:
            logits: `[sample rows, vocabulary]`, or of this rank's columns, in the model's dtype.
            mode: the highest among the rows.

        Returns:
            int64 `[sample rows]`.
        """
        rows = self.state.rows(self._view)
        if mode != SamplingMode.PROCESSED:
            return self.draw(logits, rows, mode)
        if self._shard is not None:
            logits = self._shard.gather(logits)
        return self._sample_processed(logits, rows)

    def draw(self, logits: Tensor, rows: SamplingRows, mode: SamplingMode) -> Tensor:
        """One token for each row of logits as they are.

        Args:
            logits: as for `sample`.
            rows: what they ask for.
            mode: at most FILTERED.

        Returns:
            int64 `[rows]`.
        """
        ops, shard = self._view.ops, self._shard
        if shard is not None:
            if mode <= SamplingMode.SOFTMAX:
                best = ops.best_tokens(logits, rows, mode, shard.first, shard.columns)
                return shard.choose(*best)
            logits = shard.gather(logits)
        return ops.sample(logits, rows, mode)[0]

    def _sample_processed(self, logits: Tensor, rows: ProcessingRows) -> Tensor:
        ops = self._view.ops
        processed = ops.process_logits(logits, rows, self.processed, self.kept)
        tokens, cuts = ops.sample(processed, rows, SamplingMode.FILTERED)
        entry = self._view.step.entry
        ops.log_probs(logits, processed, tokens, cuts, rows, self.log_probs, entry)
        return tokens

    def remember(self, tokens: Tensor, mode: SamplingMode) -> None:
        """After the view's `feed_back`: count the sampled tokens, int64 `[sample rows]`, that their
        rows yield."""
        if mode == SamplingMode.PROCESSED:
            self._view.ops.count_tokens(tokens, self.state.rows(self._view))


def _state_of(view: ContextGPUView, vocab_size: int) -> SamplingState:
    """The view's, or one more where the model's configuration did not tell the vocabulary."""
    state = view.states.find(SamplingState)
    if state is None:
        capacity = len(view.slots.records) - 1
        state = SamplingState(capacity, vocab_size, view.pools)
        state.allocate()
        if vocab_size:
            view.states.append(state)
    return state
