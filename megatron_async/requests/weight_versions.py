"""Which weights made which part of a request: `WeightMarks`."""

from __future__ import annotations

from dataclasses import dataclass, field

Version = str | int | None
"""The caller's name of some weights; None until one is told."""
Span = tuple[Version, int, int]
"""A version, and the half-open range of what it made: first, end."""
Marks = list[tuple[int, Version]]
"""From which place on which version counts, in the order of places."""


@dataclass(slots=True)
class WeightMarks:
    """Where in a request's life the weights changed: `tokens` counts its generated tokens, `cache`
    its cache positions. A token is of the weights that the step which launched it ran with, and so
    are the keys and values that a step wrote."""

    tokens: Marks = field(default_factory=list)
    cache: Marks = field(default_factory=list)

    def begin(self, version: Version) -> None:
        """The request was queued, while these weights are the present ones."""
        self.tokens = [(0, version)]

    def admit(self, version: Version) -> None:
        """The request got a slot: its cache is written from the beginning, or found as these
        weights wrote it."""
        self.cache = [(0, version)]

    def change(self, version: Version, generated: int, position: int | None) -> None:
        """The weights have changed behind so many generated tokens. `position` is the first cache
        position that the new weights write; None: the cache is not of older ones."""
        _mark(self.tokens, generated, version)
        if position is not None:
            _mark(self.cache, position, version)


def spans(marks: Marks, end: int) -> list[Span]:
    """The spans up to `end`, without empty ones."""
    ends = [*(first for first, _ in marks[1:]), end]
    found = [
        (version, first, min(last, end))
        for (first, version), last in zip(marks, ends, strict=False)
    ]
    return [each for each in found if each[1] < each[2]]


def _mark(marks: Marks, first: int, version: Version) -> None:
    """Write a mark; one that begins there, or behind, has made nothing."""
    while marks and marks[-1][0] >= first:
        marks.pop()
    if not marks or marks[-1][1] != version:
        marks.append((first if marks else 0, version))
