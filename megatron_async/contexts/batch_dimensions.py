"""`BatchDimensions`: everything that gives a step's tensors their shapes, known to the host."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchDimensions:
    """Shape of one step's batch. Rows are ordered: decode rows, then prefill chunks.

    Device code may use these numbers freely (they never wait for the device) and must take every
    other number from device tensors.
    """

    decode_rows: int
    """Rows with one query token each."""
    prefill_lengths: tuple[tuple[int, int], ...] = field(default=())
    """(query length, KV length after the chunk) of each prefill row."""
    max_decode_kv_length: int = 0
    """Longest KV length among the decode rows, this step's token included."""
    block_updates: int = 0
    """Entries of the block-table update list."""

    @property
    def prefill_rows(self) -> int:
        """Number of prefill chunks."""
        return len(self.prefill_lengths)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.decode_rows + self.prefill_rows

    @property
    def prefill_tokens(self) -> int:
        """Query tokens of all prefill chunks."""
        return sum(query for query, _ in self.prefill_lengths)

    @property
    def tokens(self) -> int:
        """Query tokens of the step."""
        return self.decode_rows + self.prefill_tokens

    @property
    def is_decode_only(self) -> bool:
        """Whether no row is a prefill chunk."""
        return not self.prefill_lengths
