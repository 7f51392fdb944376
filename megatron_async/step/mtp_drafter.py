"""The drafter of models that were trained for multi-token prediction (MTP; DeepSeek-V3,
arXiv 2412.19437): a layer of the model guesses the token after the next one.

The drafter runs inside the step, after sampling. All of its data is on the device: entries of its
attention in the paged cache, in KV layers after the model's (`ops/drafting/draft_tokens.py` says
which), and hidden states for each KV block (`PagedKVCache.block_hidden`). RTP-LLM's stream-async
bookkeeping (pull request 972) publishes lengths, drafts and hidden states of each request to the
next step; here the step's own last kernels store them.

Drafts are drawn with the request's own noise, temperature and filters, at the drafts' positions.
The sampler draws with the same noise, so both agree as often as the distributions allow. Penalties,
biases and bans are not applied: this may lower the acceptance rate, but changes no token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.device_state.paged_step_view import PagedStepView
from megatron_async.errors import ConfigurationError
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.drafting.draft_tokens import (
    DraftedStep,
    DraftTokens,
    ends_of_rows,
    lay_out_behind,
)
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows

if TYPE_CHECKING:
    from megatron_async.models.rotary import RotaryTable
    from megatron_async.step.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron_async.step.token_sampler import TokenSampler


class DraftView(PagedStepView):
    """The `inference_context` of a draft model's layers: the step's tokens, one position further,
    in the same cache.

    Args:
        view: the step.
        depth: whose layers, from 0.
    """

    def __init__(self, view: ContextGPUView, depth: int) -> None:
        # Its layers are full ones, whose table is the first.
        attentions = (view.draft_attentions[depth],)
        super().__init__(view.kv_cache, view.norm_eps, attentions, view.ops)
        self._view = view

    @property
    def rotary(self) -> RotaryTable:  # type: ignore[override]
        """Rotary table of the step."""
        return self._view.rotary

    def begin_pass(self, dims: BatchDimensions, tokens: DraftTokens) -> None:
        """Prepare for the layers.

        Args:
            dims: shape of the pass.
            tokens: of the pass.
        """
        self.dims, self.step = dims, tokens
        starts = tokens.starts if dims.prefill_rows else None
        self._attentions[0].begin_step(
            dims, tokens.block_tables, tokens.kv_lengths, starts, tokens.positions
        )


class MtpDrafter:
    """Proposes tokens by the model's MTP layers.

    Draft d comes from depth d, which has run over the previous depth's outputs, for the tokens of
    the step and for the d - 1 drafts before. Drafts beyond the last depth come from the last
    depth's own output and the previous draft. If one layer serves all depths (Megatron-Core's
    `mtp_use_repeated_layer`), this holds for all drafts but the first.

    Args:
        model: wrapped; it has MTP layers (`model.mtp`).
        sampler: of the engine.

    Raises:
        ConfigurationError: the model has no such layers, or `draft_vocab_size` is not served with
            it.
    """

    def __init__(self, model: GPTInferenceWrapper, sampler: TokenSampler) -> None:
        self._model = model
        self._sampler = sampler
        mtp: Any = getattr(model.model, "mtp", None)
        # A few families take the hidden state before the last norm: our stack knows.
        self._decoder: Any = getattr(model.model, "decoder", None)
        is_theirs = self._decoder is not None and not hasattr(self._decoder, "gives_mtp_hidden")
        if mtp is None or is_theirs:
            raise ConfigurationError(
                "speculative_method='mtp', but the model has no layers for multi-token prediction, "
                "was built without them (with_mtp=True builds them), or has Megatron's own, which "
                "keep no KV cache (build_model makes ours): use 'ngram', which needs no weights, "
                "or None."
            )
        self._layers: list[Any] = list(mtp.layers)
        self._views: list[DraftView] = []
        self._vocabulary = model.inference_context.config.draft_vocab_size
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        size, model = self._vocabulary, self._model
        if size is None:
            return
        if size > model.vocab_size:
            raise ConfigurationError(
                f"draft_vocab_size={size} is more than the model's {model.vocab_size} tokens: use "
                "fewer, or None for all."
            )
        if model.shard is not None:
            # The low token ids are the first rank's columns: it would work as long as alone.
            raise ConfigurationError(
                f"draft_vocab_size={size} is not served with tensor_model_parallel_size > 1, where "
                "ranks share the output layer already: use None."
            )

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        """Drafts of a step's rows; see `Drafter.propose`."""
        kept, step = view.kv_cache.block_hidden, view.step
        assert kept is not None, "the context was made for this drafter"
        if not self._views:
            numbers = range(len(view.draft_attentions))
            self._views = [DraftView(view, depth) for depth in numbers]
        ops, cache, slots = view.ops, view.kv_cache, view.slots
        size, dims = cache.block_size, view.dims
        of = DraftedStep(step, dims, slots.records, slots.length, cache.dummy_block, size)
        entries = ops.lay_out_entries(of, view.sampled)
        # A chunk reads what the one before has kept, perhaps in the block in which it ends itself.
        of_trunk = view.hidden_states if self._decoder is None else view.mtp_hidden
        assert of_trunk is not None, "the step's forward has left it"
        hidden = ops.gather_hidden(of_trunk, kept[0], entries.source)
        ends = step.last_token[dims.decode_tokens :]
        ops.keep_hidden(of_trunk, step.write_index, ends, size, kept[0])
        depths = len(self._views)
        if depths > 1:
            behind, ends = lay_out_behind(of, entries), ends_of_rows(of, entries)
        # Outputs of a depth at each row's last token and at the drafts that are known then.
        outputs: list[Tensor] = []
        drafts: list[Tensor] = []
        for depth in range(depths):
            out = self._run(depth, dims.entries, entries, hidden)
            if depth + 1 < depths:
                hidden = ops.gather_hidden(out, kept[depth + 1], behind)
                ops.keep_hidden(out, entries.write_index, ends, size, kept[depth + 1])
            before, outputs = outputs, [out.index_select(0, entries.last)]
            for number, (draft, output) in enumerate(zip(drafts, before, strict=True), 1):
                outputs.append(self._run_draft(depth, of, entries, draft, output, number))
            drafts.append(self._draw(view, outputs[-1], entries, depth))
        out = outputs[-1]
        for number in range(depths, count):
            out = self._run_draft(depths - 1, of, entries, drafts[-1], out, number)
            drafts.append(self._draw(view, out, entries, number))
        return torch.stack(drafts, dim=1)

    def _run_draft(
        self,
        depth: int,
        of: DraftedStep,
        entries: DraftTokens,
        draft: Tensor,
        hidden: Tensor,
        number: int,
    ) -> Tensor:
        """Hidden states `[rows, hidden]` of a depth at each row's draft, the `number`th."""
        tokens = self._views[depth].ops.lay_out_draft(of, entries, draft, number)
        return self._run(depth, of.dims.draft(number), tokens, hidden)

    def _run(
        self, depth: int, dims: BatchDimensions, tokens: DraftTokens, hidden: Tensor
    ) -> Tensor:
        """Hidden states `[tokens, hidden]` of a depth."""
        view = self._views[depth]
        view.begin_pass(dims, tokens)
        embedded = self._model.embed(tokens.token_ids)
        found: Tensor = self._layers[depth](embedded, hidden, view)
        return found[:, 0]

    def _draw(
        self, view: ContextGPUView, hidden: Tensor, entries: DraftTokens, number: int
    ) -> Tensor:
        """Draft `number` of each row, int64 `[rows]`."""
        logits = self._model.project_columns(hidden, self._vocabulary)
        rows = SamplingRows(view.step.row_slots, entries.lengths + number, view.slots.records)
        return self._sampler.draw(logits, rows, min(view.mode, SamplingMode.FILTERED))
