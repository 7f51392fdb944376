"""`StepShape`: the size of a step, on which ranks with different requests agree."""

from __future__ import annotations

from typing import NamedTuple

from megatron_async.captured_steps.graph_shapes import GraphShapes
from megatron_async.contexts.step_plan import IntArray
from megatron_async.ops.batch_dimensions import BatchDimensions


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
