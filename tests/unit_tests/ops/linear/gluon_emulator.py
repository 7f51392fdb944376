"""Runs a Gluon kernel of copy engine and warpgroups on the CPU; Triton's interpreter has neither.

Programs run one after the other, as plain Python on torch's tensors. What a GPU does later is done
as late as it may be: a copy spoils its place at once and fills it when somebody waits for its
barrier, and a product reads its operands when somebody waits for it. So a kernel that reads too
early, or asks for a place that is still read, has NaN in its results. A kernel fails that waits for
what nobody asked for, expects other bytes than come, reads rows before its wait for the kernel
before, or ends with copies on their way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITCallable


@dataclass
class Pointer:
    """Elements of a contiguous tensor."""

    memory: Tensor
    place: Any = 0

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset)


@dataclass
class Barrier:
    """Of one arrival a phase."""

    phase: int = 0
    expected: int | None = None
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def wait(self, phase: int) -> None:
        if self.phase != phase:
            return
        assert self.expected is not None, "waits for copies that nobody asked for"
        found = sum(value.numel() * value.itemsize for _, value in self.copies)
        assert found == self.expected, f"{found} bytes come, and {self.expected} are expected"
        for place, value in self.copies:
            place.copy_(value)
        self.copies, self.expected, self.phase = [], None, 1 - self.phase


@dataclass
class Shared:
    """Shared memory of numbers."""

    memory: Tensor
    from_here: Tensor | None = None
    """All of its buffer from its first element on."""

    def index(self, i: int) -> Shared:
        assert 0 <= i < self.memory.size(0)
        return Shared(self.memory[i], self.memory[i:].flatten())

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        assert self.from_here is not None
        return Shared(self.from_here[: math.prod(shape)].view(*shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(order))


class Barriers(list[Barrier]):
    def index(self, i: int) -> Barrier:
        return self[i]


@dataclass
class Product:
    """A product that may not have been computed yet, and its sums."""

    left: Shared
    right: Shared
    before: Any
    sums: Tensor | None = None

    def compute(self) -> None:
        before = self.before.sums if isinstance(self.before, Product) else self.before
        self.sums = before + self.left.memory.float() @ self.right.memory.float()


class Descriptor:
    """What the copy engine knows of a tensor."""

    def __init__(self, of: TensorDescriptor, is_written_before: bool) -> None:
        self.base, self.is_written_before = of.base, is_written_before
        self.block_shape, self.dtype, self.layout = of.block_shape, of.base.dtype, of.layout
        size = math.prod(of.block_shape) * of.base.itemsize
        self.block_type = SimpleNamespace(nbytes=size)

    def block(self, place: list[int]) -> Tensor:
        found = torch.zeros(*self.block_shape, dtype=self.dtype)
        sides = zip(place, self.block_shape, strict=True)
        part = self.base[tuple(slice(at, at + size) for at, size in sides)]
        found[tuple(slice(size) for size in part.shape)] = part
        return found


class Program:
    """The functions of Gluon, as one program calls them."""

    def __init__(self, number: tuple[int, ...]) -> None:
        self.number, self.has_waited = number, False
        self.products: list[Product] = []
        self.barriers: list[Barrier] = []

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared | Barriers:
        if dtype == torch.int64:
            self.barriers = Barriers(Barrier() for _ in range(shape[0]))
            return self.barriers
        return Shared(torch.full(shape, torch.nan, dtype=dtype))

    def copy(
        self, of: Descriptor, place: list[int], barrier: Barrier, to: Shared, pred: bool = True
    ) -> None:
        if pred:
            assert self.has_waited or not of.is_written_before, "reads rows before its wait"
            assert list(to.memory.shape) == list(of.block_shape)
            to.memory.fill_(torch.nan)
            barrier.copies.append((to.memory, of.block(place)))

    def expect(self, barrier: Barrier, size: int, pred: bool = True) -> None:
        if pred:
            assert barrier.expected is None, "asks for a place again before it waited for it"
            barrier.expected = size

    def multiply(self, left: Shared, right: Shared, before: Any, is_async: bool) -> Product:
        self.products.append(Product(left, right, before))
        return self.products[-1]

    def wait(self, running: int, deps: tuple[Any, ...]) -> Any:
        while len(self.products) > running:
            self.products.pop(0).compute()
        if running == 0:
            deps = tuple(d.sums if isinstance(d, Product) else d for d in deps)
        return deps[0] if len(deps) == 1 else deps

    def wait_for_previous(self) -> None:
        self.has_waited = True

    def end(self) -> None:
        assert not self.products, "ends with products on their way"
        assert not any(b.copies or b.expected for b in self.barriers), "ends with copies underway"

    def names(self) -> dict[str, Any]:
        """Replacements of a kernel's globals."""
        gl = SimpleNamespace(
            program_id=self.number.__getitem__, static_range=range, full=_full, where=_where,
            arange=lambda start, end, layout: torch.arange(start, end), load=_load, store=_store,
            exp=torch.exp, maximum=lambda y, least: y.clamp_min(least), float32=torch.float32,
            int64=torch.int64, allocate_shared_memory=self.allocate,
            SliceLayout=_none, NVMMADistributedLayout=_none, BlockedLayout=_none, rsqrt=torch.rsqrt,
            zeros=lambda shape, dtype, layout: torch.zeros(shape), sum=torch.sum,
            convert_layout=lambda value, layout: value, split=lambda value: value.unbind(-1),
        )  # fmt: skip
        return {
            "gl": gl,
            "tl": gl,
            "tma": SimpleNamespace(async_copy_global_to_shared=self.copy),
            "mbarrier": SimpleNamespace(
                init=_none, expect=self.expect, wait=Barrier.wait, MBarrierLayout=_none
            ),
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_init": lambda sums: sums,
            "warpgroup_mma_wait": self.wait,
            "gdc_wait": self.wait_for_previous,
            "gdc_launch_dependents": _none,
        }


def _none(*_: Any, **__: Any) -> None:
    return None


def _full(shape: list[int], value: float, dtype: torch.dtype, layout: Any) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


def _where(condition: bool, one: int, other: int) -> int:
    return one if condition else other


def _load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
    place, mask = torch.broadcast_tensors(pointer.place, torch.as_tensor(mask))
    found = torch.full(place.shape, other, dtype=pointer.memory.dtype)
    found[mask] = pointer.memory.view(-1)[place[mask]]
    return found


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    place, mask = torch.broadcast_tensors(pointer.place, mask)
    assert pointer.memory.view(-1)[place[mask]].isnan().all(), "an output is written twice"
    pointer.memory.view(-1)[place[mask]] = value[mask]


@dataclass
class EmulatedKernel:
    """Takes a kernel's place in its module; the first descriptor is of what the kernel before
    writes."""

    module: ModuleType
    name: str

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            for number in itertools.product(*map(range, grid)):
                program = Program(number)
                names = vars(self.module) | program.names()
                kernels = {k: v for k, v in names.items() if hasattr(v, "fn")}
                kernels |= {k: v for k, v in names.items() if isinstance(v, JITCallable)}
                kernels[self.name] = self.original
                for name, kernel in kernels.items():
                    fn = kernel.fn
                    names[name] = FunctionType(fn.__code__, names, name, fn.__defaults__)
                values: list[Any] = []
                for value in arguments:
                    if isinstance(value, TensorDescriptor):
                        value = Descriptor(value, not values)
                    values.append(Pointer(value) if isinstance(value, Tensor) else value)
                names[self.name](*values, **constants)
                program.end()

        return launch

    def __post_init__(self) -> None:
        self.original = getattr(self.module, self.name)
