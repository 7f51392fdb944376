"""Which padded shapes have a captured graph, and which of them serves a step.

Decode-only steps are padded to the next of a list of row counts. Mixed steps are packed: all their
tokens together are padded to the next of a list, finely, because a step's time grows with its
tokens. The number of their decode rows is padded too, coarsely: it bounds attention's programs and
the rows of logits, and dummy rows have no tokens. Models with recurrent layers, and drafts, need to
know where the prefill tokens begin. Their mixed steps are padded twice: prefill tokens to the next
of a list, and decode rows to the next of another list. Prefill rows are padded to a number that
grows with the tokens: short prompts that arrive together make many chunks of one step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from megatron_async.config import SHORT_PROMPT, InferenceConfig
from megatron_async.ops.batch_dimensions import BatchDimensions

LEAST_PREFILL_TOKENS = 64
"""Smaller chunks are padded to this many tokens: a step of 64 tokens takes as long as one of 16,
since both read all weights."""
FINE_TOKENS = 256
"""From so many prefill tokens on, a step's time grows with its tokens: an H200 reads the weights of
the 8B shape in the time of multiplying them by some 200 tokens."""
DECODE_STRIDE = 64
"""Decode rows between captured shapes of one number of prefill tokens, or an eighth of these."""
PACKED_DECODE_ROWS = 48
"""Fewest decode rows of a packed shape that has some: with the 16 prefill rows of most graphs they
are 64 rows of logits. On an H200 the 8B shape's vocabulary takes 249 us for these, and 276 for
80."""
PACKED_STRIDE = 32
"""Tokens between packed shapes of up to `PACKED_FINE` tokens; beyond, an eighth of the power of two
below. With 48 arrivals a second, the 8B shape has 0.3 ms less between two tokens than with padding
in both (`simulate`, docs/records/whole_steps.md); with 16 tokens 0.03 ms less again."""
PACKED_FINE = 512


class MixedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of a choice of mixed shapes."""

    sizes: list[int]
    """Token counts for which mixed steps are captured (`GraphShapes.mixed_sizes`), ascending."""
    step_tokens: int | None
    """`GraphShapes.mixed_step_tokens`."""


STRETCH = 1.8
"""A step is short if it takes at most so many times what one of few tokens takes. On an H200 the 8B
shape's steps of 256 tokens do: at 48 arrivals a second its time between tokens is 5 % shorter than
with whole prompts, and the first token comes 3 ms later. With 2.5, so 384 tokens, 3 % and as early
(docs/records/whole_steps.md)."""
SLOWER = 1.1
"""A captured shape that takes so many times what a larger one takes is of no use: cuBLAS multiplies
448 rows by the 8B shape's weights in 1.4 times the time of 480 on an H200."""
MOST_TIMED = 1024
"""Tokens of the largest step that is timed: steps of more tokens take long to time."""


@dataclass
class GraphShapes:
    """The captured shapes of one context.

    Attributes:
        decode_sizes: row counts of decode-only graphs, ascending; empty: no graphs.
        mixed_sizes: token counts of mixed graphs, ascending, and the decode rows, ascending, that
            each is captured for; empty: mixed steps run eagerly. Tokens are prefill tokens, or all
            tokens if graphs are packed.
        is_packed: see `BatchDimensions.is_packed`.
        prefill_rows: prefill rows of a mixed graph, at least.
        most_prefill_rows: the same, at most: graphs of many prefill tokens have a row for every
            `SHORT_PROMPT` tokens, so that a burst of short prompts finds a graph.
        longest_sequence: tokens.
        widths: query tokens of a decode row, ascending; each shape is captured for each.
        mixed_step_tokens: of the short mixed step whose tokens are cheapest by measurement, the
            default of `InferenceConfig.mixed_step_tokens`; None: not measured, or even the largest
            step that was measured is short.
    """

    decode_sizes: tuple[int, ...] = ()
    mixed_sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    is_packed: bool = False
    prefill_rows: int = 0
    most_prefill_rows: int = 0
    longest_sequence: int = 0
    widths: tuple[int, ...] = (1,)
    mixed_step_tokens: int | None = None
    _shapes: dict[tuple[int, int, int], BatchDimensions] = field(default_factory=dict, repr=False)

    def capture_mixed(self, config: InferenceConfig) -> None:
        """Add the mixed shapes that a configuration asks for."""
        sizes = packed_graph_sizes if self.is_packed else mixed_graph_sizes
        self.mixed_sizes = sizes(config.max_requests, config.max_tokens)
        self.prefill_rows = config.mixed_prefill_rows
        self.most_prefill_rows = config.most_mixed_prefill_rows

    def find(
        self, decode_rows: int, prefill_rows: int, prefill_tokens: int, width: int = 1
    ) -> BatchDimensions | None:
        """The smallest captured shape that holds such a step; None if there is none."""
        fitting = _next(self.widths, width)
        if fitting is None:
            return None
        if prefill_rows == 0:
            size = _next(self.decode_sizes, decode_rows)
            return None if size is None else self.shape(size, width=fitting)
        wanted = prefill_tokens + (decode_rows * fitting if self.is_packed else 0)
        tokens = _next(tuple(self.mixed_sizes), self._tokens_for(prefill_rows, wanted))
        if tokens is None or prefill_rows > self.rows_beside(tokens):
            return None
        size = _next(self.mixed_sizes[tokens], decode_rows)
        return None if size is None else self.shape(size, tokens, fitting)

    def shape(self, decode_rows: int, mixed_size: int = 0, width: int = 1) -> BatchDimensions:
        """The captured shape of so many decode rows and tokens of a mixed graph; 0: decode rows
        alone."""
        width = width if decode_rows else 1
        key = decode_rows, mixed_size, width
        if key not in self._shapes:
            self._shapes[key] = BatchDimensions(
                decode_rows=decode_rows,
                width=width,
                is_captured=True,
                padded_prefill_rows=self.rows_beside(mixed_size) if mixed_size else 0,
                padded_prefill_tokens=mixed_size,
                is_packed=self.is_packed and mixed_size > 0,
                longest_sequence=self.longest_sequence,
            )
        return self._shapes[key]

    def rows_beside(self, mixed_size: int) -> int:
        """Prefill rows of a mixed graph of so many tokens."""
        return max(self.prefill_rows, min(mixed_size // SHORT_PROMPT, self.most_prefill_rows))

    def _tokens_for(self, prefill_rows: int, tokens: int) -> int:
        """The fewest tokens of a mixed graph with room for so many prefill rows and tokens."""
        if prefill_rows <= self.prefill_rows:
            return tokens
        return max(tokens, prefill_rows * SHORT_PROMPT)

    def prefill_that_fits(self, decode_tokens: int, room: float, least: int) -> int:
        """Prefill tokens of a step that may have up to `room` of them beside so many query tokens
        of decode rows: as many as fill a mixed graph, or all if each graph has room for more; at
        least `least`."""
        beside = decode_tokens if self.is_packed else 0
        fitting = [size - beside for size in self.mixed_sizes if 0 < size - beside <= room]
        return max(max(fitting, default=int(room)), least)

    def keep_mixed_up_to(self, tokens: int) -> None:
        """Drop mixed shapes of more tokens; they will not be captured."""
        self.mixed_sizes = {size: rows for size, rows in self.mixed_sizes.items() if size <= tokens}

    def timed_shapes(self) -> list[BatchDimensions]:
        """Mixed shapes of at most `MOST_TIMED` tokens, ascending, with their fewest decode rows."""
        width = self.widths[0]
        shapes = [self.shape(rows[0], size, width) for size, rows in self.mixed_sizes.items()]
        return [dims for dims in shapes if dims.tokens <= MOST_TIMED]

    def limit_mixed_steps(self, times: Sequence[float]) -> None:
        """Set `mixed_step_tokens` to the tokens of the short step (`STRETCH`) that takes least for
        a token, if there is a longer step among those measured. The largest short step is often a
        little beyond what cuBLAS's tiles hold: 288 tokens take 1 ms more than 256 on an H200.
        `times` are those of `timed_shapes`, in any unit."""
        shapes = self.timed_shapes()
        short = {time / dims.tokens: dims.tokens for dims, time in zip(shapes, times)
                 if time <= STRETCH * times[0]}  # fmt: skip
        if len(short) < len(shapes):
            self.mixed_step_tokens = short[min(short)]

    def slow_sizes(self, times: Sequence[float]) -> list[int]:
        """The keys of `mixed_sizes` that take longer than larger ones (`SLOWER`), ascending, by the
        `times` of `timed_shapes`."""
        sizes, best, slow = list(self.mixed_sizes)[: len(times)], float("inf"), []
        for size, time in zip(reversed(sizes), reversed(times)):
            if time > SLOWER * best:
                slow.append(size)
            best = min(best, time)
        return slow[::-1]

    @property
    def row(self) -> MixedRow:
        """What has been chosen of the mixed shapes."""
        return MixedRow([*self.mixed_sizes], self.mixed_step_tokens)

    def apply(self, row: MixedRow, asked: dict[int, tuple[int, ...]]) -> None:
        """Have the mixed shapes of a row, of those `asked` before any was dropped."""
        self.mixed_sizes = {size: asked[size] for size in row.sizes}
        self.mixed_step_tokens = row.step_tokens

    def all_shapes(self) -> list[BatchDimensions]:
        """Every shape to capture, largest first, so that smaller graphs reuse its memory."""
        sizes = [(size, 0) for size in self.decode_sizes]
        sizes += [(size, tokens) for tokens, rows in self.mixed_sizes.items() for size in rows]
        shapes = {self.shape(*size, width) for width in self.widths for size in sizes}
        return sorted(shapes, key=lambda dims: (-dims.tokens, -dims.prefill_tokens, dims.width))


def make_graph_shapes(
    config: InferenceConfig,
    captures_graphs: bool,
    captures_prefill: bool,
    is_recurrent: bool = False,
) -> GraphShapes:
    """The shapes that a configuration asks for."""
    shapes = GraphShapes(
        is_packed=not is_recurrent and config.decode_width == 1,
        longest_sequence=config.max_sequence_length,
        widths=(1,) if config.decode_width == 1 else (1, config.decode_width),
    )
    count = config.num_cuda_graphs if captures_graphs else 0
    shapes.decode_sizes = graph_sizes(config.max_requests, count)
    captures_prefill = captures_prefill and config.use_cuda_graphs_for_non_decode_steps
    if shapes.decode_sizes and captures_prefill:
        shapes.capture_mixed(config)
    return shapes


def graph_sizes(max_requests: int, count: int | None) -> tuple[int, ...]:
    """Row counts of decode-only graphs, ascending, the last one `max_requests`.

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


def packed_graph_sizes(max_requests: int, max_tokens: int) -> dict[int, tuple[int, ...]]:
    """Token counts of packed graphs and, for each, decode row counts: 0, `PACKED_DECODE_ROWS`,
    twice as many, and so on, and the most that there may be."""
    sizes = list(range(LEAST_PREFILL_TOKENS, min(max_tokens, PACKED_FINE), PACKED_STRIDE))
    tokens = PACKED_FINE
    while tokens < max_tokens:
        sizes += [tokens + part * tokens // 8 for part in range(8)]
        tokens *= 2
    sizes = [size for size in sizes if size < max_tokens] + [max_tokens]
    found = {}
    for size in sizes:
        most, rows, count = min(max_requests, size), [0], PACKED_DECODE_ROWS
        while count < most:
            rows.append(count)
            count *= 2
        found[size] = (*rows, most)
    return found


def mixed_graph_sizes(max_requests: int, max_tokens: int) -> dict[int, tuple[int, ...]]:
    """Prefill token counts of mixed graphs and, for each, decode row counts.

    Token counts grow by turns by a half and a third up to `FINE_TOKENS` (64, 96, 128, 192, 256),
    so that at most a third of them is padding, and by a quarter of the power of two below them up
    to twice as many, by an eighth from there on. Decode rows: 0, and multiples of `DECODE_STRIDE`
    or of an eighth of the token count up to `max_requests`."""
    sizes = []
    tokens = LEAST_PREFILL_TOKENS
    while tokens < max_tokens:
        parts = 2 if tokens < FINE_TOKENS else 4 if tokens == FINE_TOKENS else 8
        sizes += [tokens + part * tokens // parts for part in range(parts)]
        tokens *= 2
    sizes = [size for size in sizes if size < max_tokens] + [max_tokens]
    return {size: _decode_rows_beside(size, max_requests) for size in sizes}


def _decode_rows_beside(prefill_tokens: int, max_requests: int) -> tuple[int, ...]:
    below = 1 << (prefill_tokens.bit_length() - 1)  # the power of two
    stride = max(DECODE_STRIDE, below // 8)
    return (0, *range(stride, max_requests, stride), max_requests)


def _next(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest of ascending `sizes` that is at least `wanted`."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
