"""`CacheLayout`: which block table serves each layer of the KV cache.

Layers are of a *kind*: full, or of a window of so many keys. A block holds keys and values of some
layers of one kind, the same number of layers for all kinds, so that blocks are of one size and form
one pool. A request has a block table for each group of so many layers. That groups of layers of
equal bytes share a pool is vLLM's idea (its design page "Hybrid KV Cache Manager").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_TABLES = 8
"""Block tables of a request: each costs an entry for every block, and some work in each step."""
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
    """
    of_model = [window for stage in stages for window in stage]
    kinds = sorted(set(of_model)) or [0]
    counts = [max(of_model.count(kind), 1) for kind in kinds]
    sizes = range(max(counts), 0, -1)
    tables = [[-(-count // size) for count in counts] for size in sizes]
    few = [each for each in zip(sizes, tables) if sum(each[1]) <= max(MOST_TABLES, len(kinds))]
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


def _cost(kinds: list[int], counts: list[int], size: int, tables: list[int]) -> float:
    empty = [size * n - count for n, count in zip(tables, counts, strict=True)]
    weighed = (FULL_PLACE * n if kind == 0 else n for kind, n in zip(kinds, empty, strict=True))
    return sum(weighed) + TABLE * sum(tables)
