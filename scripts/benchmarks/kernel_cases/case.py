"""A case: what is timed, what it takes at the least, and the family that it belongs to."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_cases.hardware import Hardware

OURS = "ours"
"""The column of this engine's kernel."""


@dataclass(frozen=True)
class Chain:
    """What one graph holds.

    Attributes:
        run: enqueues `links` layers, or calls, one after the other.
        links: times are of one of them.
        captured: False where `run` cannot be captured; it is then launched as it is.
    """

    run: Callable[[], None]
    links: int = 1
    captured: bool = True


@dataclass(frozen=True)
class Work:
    """A case on the GPU, ready to be timed.

    Attributes:
        chains: by column; `OURS` is there.
        floor_us: microseconds that one link takes at the least.
        figures: what else the record says.
        refused: by column, why a reference cannot be had here.
        candidates: named variants of the kernel, of which the best are told.
    """

    chains: Mapping[str, Chain]
    floor_us: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    candidates: Iterable[tuple[str, Chain]] = ()


@dataclass(frozen=True)
class Case:
    """One kernel, or one chain of kernels, at one size; nothing is on the GPU yet.

    Attributes:
        name: unique in its family.
        keys: what tells its figures from others of the family in a record.
        prepare: puts it on the GPU.
    """

    name: str
    keys: Mapping[str, Any]
    prepare: Callable[[], Work]


@dataclass(frozen=True)
class Family:
    """Cases of one kind.

    Attributes:
        name: as `--family` takes it, and of the record.
        about: one line of help.
        shapes: names that `--shapes` takes.
        default_shapes: those measured when none is named.
        parts: columns of our kernels beside `OURS`; what fails there ends the benchmark.
        references: columns of others' kernels; one may refuse a case.
        add_options: adds the family's own options.
        cases: all cases, lazily, given the options, the shapes and the GPU's rates.
        record: the record's name where it is not the family's.
    """

    name: str
    about: str
    shapes: Sequence[str]
    default_shapes: Sequence[str]
    parts: Sequence[str]
    references: Sequence[str]
    add_options: Callable[[argparse._ArgumentGroup], None]
    cases: Callable[[argparse.Namespace, Sequence[str], Hardware], Iterator[Case]]
    record: Callable[[argparse.Namespace], str] | None = None

    @property
    def columns(self) -> list[str]:
        """Every column of times, ours first."""
        return [OURS, *self.parts, *self.references]

    def chosen_shapes(self, asked: Sequence[str] | None) -> list[str]:
        """Of the shapes asked for those that the family knows; its own choice for None."""
        if asked is None:
            return list(self.default_shapes)
        return [name for name in asked if name in self.shapes]

    def record_name(self, args: argparse.Namespace) -> str:
        """What the record is called, given the options."""
        return self.name if self.record is None else self.record(args)


@dataclass
class Shelf[T]:
    """Keeps what the cases of one shape share, and drops it before the next shape's is made."""

    key: object = None
    kept: T | None = None

    def take(self, key: object, make: Callable[[], T]) -> T:
        """What `make` gives, made once for neighbouring calls with equal keys."""
        if self.kept is None or key != self.key:
            self.kept = None
            self.kept, self.key = make(), key
        return self.kept
