"""`BatchDimensions`: everything that gives a step's tensors their shapes, known to the host."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchDimensions:
    """Shape of one step's batch. Rows are ordered: decode rows, then prefill chunks.

    A decode-only step may be padded to a size for which a graph was captured: its last decode rows
    are then dummy rows, which belong to the dummy slot and to no request.

    Device code may use these numbers freely (they never wait for the device) and must take every
    other number from device tensors.
    """

    decode_rows: int
    """Rows with one query token each, dummy rows included."""
    prefill_lengths: tuple[tuple[int, int], ...] = field(default=())
    """(query length, KV length after the chunk) of each prefill row."""
    max_decode_kv_length: int = 0
    """Longest KV length among the decode rows, this step's token included."""
    block_updates: int = 0
    """Entries of the block-table update list, padding included."""
    is_captured: bool = False
    """Whether a graph was captured for this shape (a padded decode-only step)."""

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


def graph_sizes(max_requests: int, count: int | None) -> tuple[int, ...]:
    """Row counts to capture, ascending, the last one `max_requests`.

    Args:
        max_requests: most rows of a step.
        count: number of sizes, evenly spaced; 0 for none; None for small sizes close together
            (1, 2, 4, then every 8 to 256, then every 32), because padding costs most there.
    """
    if count == 0:
        return ()
    if count is None:
        sizes = {1, 2, 4, *range(8, 257, 8), *range(256, max_requests, 32)}
    else:
        sizes = {max(1, round(max_requests * (i + 1) / count)) for i in range(count)}
    return (*sorted(size for size in sizes if size < max_requests), max_requests)
