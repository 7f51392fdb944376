"""`BatchDimensions`: everything that gives a step's tensors their shapes, known to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BatchDimensions:
    """Shape of one step's batch. Rows are ordered: decode rows, then prefill chunks.

    A step may be padded to a shape for which a graph was captured. Its last decode rows and its
    last prefill rows are then dummy rows, which belong to the dummy slot and to no request, and its
    last prefill tokens belong to no row. In a packed shape dummy decode rows have no query tokens:
    the chunks' tokens come behind those of the other decode rows, at a place that only the device
    knows (`StepTensors.prefill_starts`). So a packed shape is padded in all its tokens once.

    Device code may use these numbers freely (they never wait for the device) and must take every
    other number from device tensors.
    """

    decode_rows: int
    """Rows that decode, dummy rows included."""
    width: int = 1
    """Query tokens of each decode row: its last token, then drafts."""
    prefill_lengths: tuple[tuple[int, int], ...] = ()
    """(query length, KV length after the chunk) of each prefill row; empty for a captured shape,
    which serves any lengths."""
    max_decode_kv_length: int = 0
    """Longest KV length among the decode rows, this step's token included; 0 when captured."""
    is_captured: bool = False
    """Whether this is the shape of a captured graph."""
    padded_prefill_rows: int = 0
    """Prefill rows of a captured shape, dummy rows included."""
    padded_prefill_tokens: int = 0
    """Prefill tokens of a captured shape, padding included; of a packed one all its tokens."""
    is_packed: bool = False
    """Whether a captured shape with prefill chunks is packed. It has no more decode tokens than
    tokens."""
    longest_sequence: int = 0
    """Longest sequence that a captured shape serves; 0 for others."""
    dispatch_tokens: int = 0
    """Tokens that each rank of an expert-parallel group sends to the others, padding included, when
    another rank has more than this one; 0: as many as this step has."""
    dispatch_entries: int = 0
    """`dispatch_tokens` of a draft model's pass over entries (`ops/drafting/draft_tokens.py`); it
    has one more token of each chunk."""
    dispatch_rows: int = 0
    """`dispatch_tokens` of its passes over one token of each row."""

    @property
    def prefill_rows(self) -> int:
        """Number of prefill chunks, dummy rows included."""
        return self.padded_prefill_rows if self.is_captured else len(self.prefill_lengths)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.decode_rows + self.prefill_rows

    @property
    def decode_tokens(self) -> int:
        """Query tokens of all decode rows. The tokens of a row are neighbours. In a packed shape,
        those that there may be."""
        return self.decode_rows * self.width

    @property
    def sample_rows(self) -> int:
        """Rows of logits: one for each query token of the decode rows, then one for each chunk."""
        return self.decode_tokens + self.prefill_rows

    @property
    def prefill_tokens(self) -> int:
        """Query tokens of all prefill chunks, padding included. In a packed shape, those that
        there may be: all."""
        if self.is_captured:
            return self.padded_prefill_tokens
        return sum(query for query, _ in self.prefill_lengths)

    @property
    def tokens(self) -> int:
        """Query tokens of the step, padding included."""
        if self.is_packed:
            return self.padded_prefill_tokens
        return self.decode_tokens + self.prefill_tokens

    @property
    def max_query_length(self) -> int:
        """No prefill chunk has more query tokens."""
        if self.is_captured:
            return self.padded_prefill_tokens
        return max((query for query, _ in self.prefill_lengths), default=0)

    @property
    def max_prefill_kv_length(self) -> int:
        """No prefill row has a longer KV length."""
        if self.is_captured:
            return self.longest_sequence
        return max((kv for _, kv in self.prefill_lengths), default=0)

    @property
    def is_decode_only(self) -> bool:
        """Whether no row is a prefill chunk."""
        return self.prefill_rows == 0

    @property
    def graph_key(self) -> tuple[int, int, int]:
        """The key of a captured shape among those of an engine: decode rows, prefill tokens and
        width."""
        return self.decode_rows, self.padded_prefill_tokens, self.width

    @property
    def entries(self) -> BatchDimensions:
        """Shape of a draft model's pass over entries, behind a step of this shape: as many tokens
        of each decode row, and one more of each chunk."""
        return replace(
            self,
            prefill_lengths=tuple((query + 1, kv + 1) for query, kv in self.prefill_lengths),
            max_decode_kv_length=self.max_decode_kv_length + 1,
            padded_prefill_tokens=self.padded_prefill_tokens + self.padded_prefill_rows,
            longest_sequence=self.longest_sequence + 1,
            dispatch_tokens=self.dispatch_entries,
        )

    def draft(self, number: int) -> BatchDimensions:
        """Shape of a draft model's pass over one token of each row, behind a step of this shape,
        which makes a draft's `number`: 1 or more, as draft 0 comes from the pass over entries."""
        longest = max(self.max_decode_kv_length, self.max_prefill_kv_length)
        return BatchDimensions(
            decode_rows=self.rows,
            max_decode_kv_length=longest + 1 + number,
            is_captured=self.is_captured,
            longest_sequence=self.longest_sequence + 1 + number,
            dispatch_tokens=self.dispatch_rows,
        )
