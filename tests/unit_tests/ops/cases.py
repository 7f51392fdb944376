"""A case of an op: arguments for all of its implementations, which tests compare and benchmarks
time. Each family has its own in `cases.py`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron_async.ops.op import Op

Arguments = tuple[Any, ...]
Axes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Numbers:
    """Normal numbers of a dtype on a device."""

    device: str
    dtype: torch.dtype

    def rows(self, *size: int, pad: int = 0, scale: float = 1.0) -> Tensor:
        """Rows of this size, with so many elements between the end of a row and the next one."""
        whole = torch.randn(*size[:-1], size[-1] + pad, device=self.device)
        return (scale * whole).to(self.dtype)[..., : size[-1]]


@dataclass(frozen=True)
class OpCase:
    """Arguments of an op, for all its implementations: `make` makes them anew at each call (the op
    may write to them); `is_large` ones are of a model's sizes, for a GPU alone."""

    op: Op[..., Any]
    make: Callable[[Numbers], Arguments]
    name: str
    is_large: bool = False
    shared: Callable[[Any], Any] = lambda found: found

    def __str__(self) -> str:
        return self.name


def grid(
    op: Op[..., Any],
    make: Callable[..., Arguments],
    axes: Axes,
    is_large: bool = False,
    shared: Callable[[Any], Any] = lambda found: found,
) -> Iterator[OpCase]:
    """A case for every combination of sizes; a name of `axes` may be several, for tuples."""
    for point in product(*axes.values()):
        sizes: dict[str, Any] = {}
        for names, value in zip(axes, point, strict=True):
            keys = names.split()
            sizes |= zip(keys, value if len(keys) > 1 else [value], strict=True)
        name = " ".join([op.name, *(f"{key}={value}" for key, value in sizes.items())])
        yield OpCase(op, partial(make, **sizes), name, is_large, shared)
