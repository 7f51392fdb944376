"""A case of a family of kernels: tensors, what the hardware could do, and the time."""

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.devices import make_device

BANDWIDTH = 4.3e12
"""Bytes a second that a large copy moves on an H200, reads and writes together; measured."""
MATRIX_RATE = 790e12
"""Operations a second (a multiplication and its addition are two) of a large dense bfloat16 product
of cuBLAS on an H200; measured. The data sheet's peak is 989e12, which no product reaches."""
CACHE_BYTES = 120e6
"""Twice the L2 cache of an H200: what goes through more bytes than this finds none of them there
when it begins again."""


class Need(NamedTuple):
    """What one layer, or one call, cannot do without: bytes read from and written to memory, and
    operations of the matrix units."""

    moved: float
    operations: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """Rates of a GPU: bytes and operations a second."""

    bandwidth: float = BANDWIDTH
    matrix_rate: float = MATRIX_RATE

    def floor_us(self, need: Need) -> float:
        """The larger of the two times that the bytes and the operations take, microseconds."""
        return max(need.moved / self.bandwidth, need.operations / self.matrix_rate) * 1e6


DTYPE = torch.bfloat16
MEMORY = 4e9
"""Bytes of states or caches that the layers of a case may take; there are 2 to 30 of them."""


def random(*size: int, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> Tensor:
    """Normal numbers of this standard deviation on the GPU, drawn in `dtype`."""
    return torch.randn(size, device="cuda", dtype=dtype).mul_(scale)


def layers_that_fit(layer_bytes: int) -> int:
    """Number of layers that fit, so many that none of their states or caches stays in the L2 cache.

    Args:
        layer_bytes: of one layer, all rows.
    """
    return max(2, min(30, int(MEMORY / layer_bytes)))


OURS = "ours"
"""The column of this engine's kernel."""


@dataclass(frozen=True)
class Chain:
    """What one graph holds: `run` enqueues `links` layers, or calls, one after the other, and times
    are of one of them. Where `run` cannot be captured, it is launched as it is."""

    run: Callable[[], None]
    links: int = 1
    captured: bool = True


@dataclass(frozen=True)
class Work:
    """A case on the GPU, ready to be timed. By column: `chains` (`OURS` is there), and why a
    reference cannot be had here. `floor_us` is what one link takes at the least, `figures` what
    else the record says; of named variants of the kernel (`candidates`) the best are told."""

    chains: Mapping[str, Chain]
    floor_us: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    candidates: Iterable[tuple[str, Chain]] = ()


@dataclass(frozen=True)
class Case:
    """One kernel, or one chain of kernels, at one size; nothing is on the GPU yet, `prepare` puts
    it there. `keys` tell its figures from others of the family in a record."""

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


WINDOWS = 5


@torch.inference_mode()
def microseconds(chain: Chain, replays: int) -> float:
    """Median device time of one link, microseconds.

    A window is `replays` replays between two events on the compute stream, as steps follow each
    other there: dependent launch works on one stream only. The first window is left out.
    """
    device = make_device("cuda")
    device.fence()
    device.compute.launch(chain.run)  # compiles
    again = device.capture(chain.run).replay if chain.captured else chain.run
    times = []
    for _ in range(WINDOWS + 1):
        start, end = device.event(timing=True), device.event(timing=True)
        device.compute.record(start)
        for _ in range(replays):
            device.compute.launch(again)
        device.compute.record(end)
        end.wait()
        times.append(end.us_since(start) / replays)
    return statistics.median(times[1:]) / chain.links


def repeated(run: Callable[[], object], times: int) -> Chain:
    """A chain of so many calls of a function, whose results are dropped."""

    def calls() -> None:
        for _ in range(times):
            run()

    return Chain(calls, times)
