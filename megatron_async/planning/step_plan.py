"""`StepPlan`: the immutable CPU description of one step. Once launched, nothing changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_async.device_state.state_table import StatePlan
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.planning.graph_shapes import GraphShapes

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class BlockUpdates:
    """Entries that this step adds to block tables: table[slot, index] = block. Slots are int64,
    indices and blocks int32; one length."""

    slots: IntArray
    indices: IntArray
    blocks: IntArray


class PromptSpan(NamedTuple):
    """Tokens of a prefill chunk at which log probs are made of the token after each."""

    chunk: int
    first: int
    """Index of the first in `StepPlan.prefill_token_ids`."""
    end: int
    features: int
    """Bits of `RowFeature`."""


@dataclass(frozen=True, eq=False)
class PlanFeatures:
    """The work of the host for the rows of a step, beside booking their tokens."""

    wants_log_probs: bool = False
    """Whether a row asks for log probs of its sample."""
    prompt_spans: tuple[PromptSpan, ...] = ()
    """Where log probs of prompts are wanted."""
    num_prompt_log_probs: int = 0
    """Tokens of the spans."""
    constrained_rows: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Rows that produce a token with a grammar: they are sampled separately."""
    forced_routing: NDArray[np.int16] | None = None
    """Experts that the tokens of `StepPlan.prefill_token_ids` have to go to, `[tokens, layers,
    topk]`, -1 for the router's choice; None: it chooses everywhere."""

    @property
    def needs_copy(self) -> bool:
        """Whether a copy brings something of the step to the host that the step does not write
        there itself: log probs, and what is sampled behind it."""
        return (
            self.wants_log_probs or self.num_prompt_log_probs > 0 or len(self.constrained_rows) > 0
        )


NO_FEATURES = PlanFeatures()
"""What every plan below the mode PROCESSED shares."""


@dataclass(frozen=True)
class StepPlan:
    """One step: which slots run, with which tokens, and how to use the result.

    Results are matched against `slots` and `generations` at resolve. If a slot has a new owner by
    then, the row is a zombie and its output is dropped.
    """

    step: int
    """Number of the step, counted from 0."""
    dims: BatchDimensions
    num_decode: int
    """Rows that decode; the others are prefill chunks."""
    width: int
    """Most tokens that a decode row yields. `dims.width` may be more, in a captured shape."""
    slots: IntArray
    """int64 `[rows]`, decode rows first; dummy rows of a padded step are not in the plan."""
    generations: IntArray
    """int64 `[rows]`."""
    kv_at_most: IntArray
    """int32 `[rows]`: bound of the KV length once this step's tokens are appended. Exact for
    prefill chunks, and for rows whose steps in flight all have width 1."""
    widths: IntArray
    """int32 `[rows]`: most tokens that the row yields: `width`, but no more drafts than the request
    allows (none under a grammar), and 1 for prefill chunks."""
    produces: NDArray[np.bool_]
    """bool `[rows]`: whether the row's sample is a token of its request (not so for a prefill chunk
    that leaves part of the prompt for later)."""
    sampling_mode: SamplingMode
    block_updates: BlockUpdates
    prefill_starts: IntArray
    """int32 `[prefill chunks + 1]`: where each chunk begins in `prefill_token_ids`, and its end."""
    prefill_token_ids: IntArray
    """int32 `[prefill tokens]`: query tokens of the chunks, end to end."""
    prefill_features: IntArray
    """int32 `[prefill chunks]`: the bits of `RowFeature` that hold for this step alone."""
    prefill_following: IntArray
    """int32 `[prefill chunks]`: the known token after each chunk, or -1."""
    features: PlanFeatures
    """Work of the host for the rows beyond tokens: log probs, grammars."""
    states: StatePlan | None = None
    """None if recurrent states are not shared, or if all rows use their slot's state."""
    short_of_blocks: bool = False
    """Whether decode rows have fewer drafts because no blocks are free."""

    @property
    def num_rows(self) -> int:
        """Rows that belong to requests."""
        return len(self.slots)

    @property
    def kind(self) -> str:
        """Decode, Prefill, or Mixed for rows of both; Dummy without rows."""
        if self.num_decode:
            return "Decode" if self.num_decode == self.num_rows else "Mixed"
        return "Prefill" if self.num_rows else "Dummy"

    @property
    def first_prefill_token(self) -> int:
        """Index of the first chunk's first token among the step's tokens; of the tokens' end where
        there is no chunk."""
        dims = self.dims
        return self.num_decode * dims.width if dims.is_packed else dims.decode_tokens

    @property
    def work_tokens(self) -> tuple[int, int]:
        """Prefill tokens, and query tokens of decode rows; padding included."""
        return self.dims.tokens - self.first_prefill_token, self.first_prefill_token

    def device_rows(self, rows: IntArray) -> IntArray:
        """Indices of the plan's rows among the device's rows."""
        dummies = self.dims.decode_rows - self.num_decode
        return np.where(rows < self.num_decode, rows, rows + dummies)

    def sample_rows(self, rows: IntArray) -> IntArray:
        """The first row of logits of each of `rows` of the plan."""
        chunks = rows - self.num_decode
        return np.where(chunks < 0, rows * self.dims.width, chunks + self.dims.decode_tokens)

    def rows_of(self, device_rows: IntArray) -> IntArray:
        """Pick what belongs to the plan's rows from an array over the device's rows, among which a
        padded step has dummy rows."""
        first_chunk = self.dims.decode_rows
        if self.num_decode in (self.num_rows, first_chunk):
            return device_rows[: self.num_rows]
        chunks = self.num_rows - self.num_decode
        picked = device_rows[first_chunk : first_chunk + chunks]
        return np.concatenate((device_rows[: self.num_decode], picked))


class StepShape(NamedTuple):
    """Sizes of one rank's step; of several ranks' steps, the largest of each.

    Ranks that share experts launch their steps together, in one shape: a rank with less work pads
    its step, and a rank without work launches a dummy step.
    """

    decode_rows: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    tokens: int = 0
    """Query tokens."""
    is_eager: int = 0
    """1: it cannot be captured."""
    width: int = 1
    """Query tokens of a decode row."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch."""
        return self.tokens == 0

    def captured(self, graph_shapes: GraphShapes) -> BatchDimensions | None:
        """The captured shape that holds such a step, the same on all ranks; None if there is
        none."""
        if self.is_eager:
            return None
        return graph_shapes.find(
            self.decode_rows, self.prefill_rows, self.prefill_tokens, self.width
        )

    def eager(
        self, width: int, kv_lengths: IntArray, prefill_lengths: tuple[tuple[int, int], ...]
    ) -> BatchDimensions:
        """The dimensions of one rank's part of such a step where it is not captured.

        Args:
            width: of its own decode rows; ranks may differ in it.
            kv_lengths: bounds of its decode rows; see `StepPlan.kv_at_most`.
            prefill_lengths: see `BatchDimensions`.
        """
        rows, longest = len(kv_lengths), int(kv_lengths.max(initial=0))
        if not rows and not prefill_lengths:
            rows = longest = width = 1  # a dummy row
        chunks = len(prefill_lengths)
        tokens = rows * width + sum(query for query, _ in prefill_lengths)

        def padded(agreed: int, own: int) -> int:
            return agreed if agreed > own else 0

        return BatchDimensions(
            decode_rows=rows,
            width=width,
            prefill_lengths=prefill_lengths,
            max_decode_kv_length=longest,
            dispatch_tokens=padded(self.tokens, tokens),
            dispatch_entries=padded(self.tokens + self.prefill_rows, tokens + chunks),
            dispatch_rows=padded(self.decode_rows + self.prefill_rows, rows + chunks),
        )
