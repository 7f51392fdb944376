"""`CacheLayout`: which block table serves each layer of the KV cache; `BlockNeeds`: how many blocks
a sequence needs in all its tables.

Layers are of a *kind*: full, or of a window of so many keys. A block holds keys and values of some
layers of one kind, the same number of layers for all kinds, so that blocks are of one size and form
one pool. A request has a block table for each group of so many layers. That groups of layers of
equal bytes share a pool is vLLM's idea (its design page "Hybrid KV Cache Manager").
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_async.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_async.config import InferenceConfig

MOST_TABLES = 8
"""Block tables of a request: each costs an entry for every block, and some work in each step."""
SHORT_WINDOW, BLOCK_OF_SHORT_WINDOWS = 256, 64
"""Keys of a window below which blocks have so many tokens by default."""
FULL_PLACE, TABLE = 4.0, 0.5
"""Costs of a layout in empty places of window layers. Long sequences have nearly all blocks in
full layers."""


@dataclass(frozen=True)
class CacheLayout:
    """The block tables of a model, those of full layers first, and the layers of one pipeline
    stage."""

    windows: tuple[int, ...]
    """Keys that a token sees in the layers of each table; 0: all."""
    places: tuple[tuple[int, int], ...]
    """Table, and place in a block, of each layer of the stage."""
    layers: int
    """Layers of which a block holds keys and values; some places may be empty."""


def cache_layout(stages: Sequence[Sequence[int]], index: int = 0) -> CacheLayout:
    """The layout of a model on one pipeline stage.

    Tables are the same on all stages. Of the sizes of a group that lead to at most `MOST_TABLES`
    tables the cheapest is taken, and of equal ones the largest: an empty place costs one in a
    window's table, `FULL_PLACE` in one of full layers, and a table costs `TABLE`.

    Args:
        stages: for each stage the windows of its layers, 0 for full ones.
        index: of the stage.

    Raises:
        ConfigurationError: there are more kinds than tables may be.
    """
    of_model = [window for stage in stages for window in stage]
    kinds = sorted(set(of_model)) or [0]
    if len(kinds) > MOST_TABLES:
        raise ConfigurationError(
            f"layers see {len(kinds)} different numbers of keys, {kinds}: at most {MOST_TABLES} "
            "are served."
        )
    counts = [max(of_model.count(kind), 1) for kind in kinds]
    sizes = range(max(counts), 0, -1)
    tables = [[-(-count // size) for count in counts] for size in sizes]
    few = [each for each in zip(sizes, tables) if sum(each[1]) <= MOST_TABLES]
    groups = min(few, key=lambda each: _cost(kinds, counts, *each))[1]
    here = [stages[index].count(kind) for kind in kinds]
    layers = max(-(-count // group) for count, group in zip(here, groups, strict=True))
    places, seen = [], dict.fromkeys(kinds, 0)
    for window in stages[index]:
        first = sum(groups[: kinds.index(window)])
        table, place = divmod(seen[window], max(layers, 1))
        places.append((first + table, place))
        seen[window] += 1
    windows = [kind for kind, group in zip(kinds, groups, strict=True) for _ in range(group)]
    return CacheLayout(tuple(windows), tuple(places), layers)


def default_block_size(windows: Sequence[int], usual: int) -> int:
    """Tokens of a block, where nobody says: `usual`, or fewer with a short window, whose first and
    last block are in use in part."""
    shortest = min((window for window in windows if window), default=SHORT_WINDOW)
    return usual if shortest >= SHORT_WINDOW else min(usual, BLOCK_OF_SHORT_WINDOWS)


def _cost(kinds: list[int], counts: list[int], size: int, tables: list[int]) -> float:
    empty = [size * n - count for n, count in zip(tables, counts, strict=True)]
    weighed = (FULL_PLACE * n if kind == 0 else n for kind, n in zip(kinds, empty, strict=True))
    return sum(weighed) + TABLE * sum(tables)


class BlockNeeds:
    """How many blocks a sequence needs, over all its tables.

    Args:
        windows: of each block table, those of full layers (0) first.
        block_size: tokens of a block.
        ahead: most tokens that a request's blocks reach beyond the first query to come.

    Attributes:
        windows, block_size: as given.
        full: tables of full layers.
        kinds: each window, its first table, and the tables that have it.
    """

    def __init__(self, windows: Sequence[int], block_size: int, ahead: int = 1) -> None:
        self.windows, self.block_size, self._ahead = tuple(windows), block_size, ahead
        self.full = self.windows.count(0)
        self.kinds = [
            (each, self.windows.index(each), self.windows.count(each))
            for each in sorted({*self.windows} - {0})
        ]

    def span(self, window: int, tokens: int) -> int:
        """Blocks of a table that a request holds at most while `tokens` are written at once."""
        return (window + tokens - 2) // self.block_size + 2

    def of_windows(self, count: int, tokens: int | None = None) -> int:
        """Blocks for `count` blocks of a sequence in the tables of windows, at any one time, while
        `tokens` are written at once; None: as few as there can be."""
        tokens = self._ahead if tokens is None else tokens
        return sum(n * min(count, self.span(window, tokens)) for window, _, n in self.kinds)

    def of(self, count: int) -> int:
        """Blocks without which a sequence of `count` blocks cannot come to its end."""
        return self.full * count + self.of_windows(count)

    def longest(self, total: int, most: int) -> int:
        """How many blocks of a sequence, `most` or fewer, a pool of `total` blocks serves."""
        return bisect_right(range(1, most + 1), total, key=self.of)


def block_needs(windows: Sequence[int], config: InferenceConfig) -> BlockNeeds:
    """The needs of an engine's requests."""
    # Under the policy "rollback" the first query to come is that behind the last known token.
    ahead = config.steps_in_flight * config.decode_width + config.draft_places
    if not config.enable_chunked_prefill:
        ahead = max(ahead, config.max_tokens)
    return BlockNeeds(windows, config.block_size_tokens, ahead)
