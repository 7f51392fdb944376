"""What the numbers of a weight are kept as, where they are kept in another form than the model's.

A format is a name and its implementations: a class that makes the kept weight of the model's own,
and multiplies by it. Classes for CPUs are in `ops/linear/cpu`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Format(NamedTuple):
    """A format of numbers.

    Attributes:
        name: in words.
        bits: of a number.
    """

    name: str
    bits: int


FLOAT32 = Format("float32", 32)
INT8 = Format("8-bit integers", 8)
INT4 = Format("4-bit integers in groups", 4)


class KeptWeight(Protocol):
    """A weight `[outputs, k]` in a format, laid out for its kernels.

    Attributes:
        format: of its numbers.
        nbytes: of all that is kept.
        looped: the weight, where our own loops multiply it; else None.
    """

    format: Format
    nbytes: int
    looped: Any

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`: `[..., k]` -> `[..., outputs]`."""
