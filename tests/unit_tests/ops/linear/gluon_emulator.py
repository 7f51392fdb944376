"""Runs a Gluon kernel of copy engine and warpgroups on the CPU; Triton's interpreter has neither.

Programs run one after the other, as plain Python on torch's tensors. What a GPU does later is done
as late as it may be: a copy spoils its place at once and fills it when somebody waits for its
barrier, and a product reads its operands when somebody waits for it. So a kernel that reads too
early, or asks for a place that is still read, has NaN in its results. A kernel fails that waits for
what nobody asked for, expects other bytes than come, reads rows before its wait for the kernel
before, or ends with copies on their way.

Programs, and partitions of a program, run one at a time, in an order drawn by a seed. A partition
runs until it waits for what another one has to do, or, now and then, hands over at a wait whose
condition holds: so orders are tried that a GPU takes seldom.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr
from triton.runtime.jit import JITCallable


@dataclass
class Pointer:
    """Elements of memory from a tensor's first one on."""

    memory: Tensor
    place: Any = 0
    is_stored_again: bool = False

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset, self.is_stored_again)

    @property
    def elements(self) -> Tensor:
        whole = self.memory.untyped_storage().nbytes() // self.memory.itemsize
        return self.memory.as_strided((whole - self.memory.storage_offset(),), (1,))


@dataclass
class Barrier:
    """`count` arrivals a phase; a partition that expects copies arrives."""

    count: int = 1
    phase: int = 0
    arrived: int = 0
    expected: int | None = None
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def arrive(self) -> None:
        self.arrived += 1
        assert self.arrived <= self.count, "more arrive than the barrier waits for"
        if self.arrived == self.count and self.expected is None:
            self.arrived, self.phase = 0, 1 - self.phase

    def is_over(self, phase: int) -> bool:
        """Whether the phase is; copies are there when somebody asks."""
        if self.phase == phase and self.arrived == self.count:
            assert self.expected is not None
            found = sum(value.numel() * value.itemsize for _, value in self.copies)
            assert found <= self.expected, f"{found} bytes come, and {self.expected} are expected"
            if found == self.expected:
                for place, value in self.copies:
                    place.copy_(value)
                self.copies, self.expected, self.arrived = [], None, 0
                self.phase = 1 - self.phase
        return self.phase != phase


@dataclass
class Shared:
    """Shared memory of numbers."""

    memory: Tensor
    from_here: Tensor | None = None
    """All of its buffer from its first element on."""
    layout: Any = None

    def index(self, i: int) -> Shared:
        assert 0 <= i < self.memory.size(0)
        return Shared(self.memory[i], self.memory[i:].flatten())

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        assert self.from_here is not None
        return Shared(self.from_here.view(dtype)[: math.prod(shape)].view(*shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(order))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.memory.narrow(dim, start, length))

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.memory.dtype
        self.memory.copy_(value)

    def load(self, layout: Any) -> Tensor:
        return self.memory.clone()

    @property
    def shape(self) -> torch.Size:
        return self.memory.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype


class Barriers(list[Barrier]):
    @property
    def shape(self) -> tuple[int, int]:
        return len(self), 1

    def index(self, i: int) -> Barrier:
        return self[i]


@dataclass
class Product:
    """A product that may not have been computed yet, and its sums."""

    left: Shared | Tensor
    right: Shared
    before: Any
    sums: Tensor | None = None

    def compute(self) -> None:
        before = self.before.sums if isinstance(self.before, Product) else self.before
        left = self.left.memory if isinstance(self.left, Shared) else self.left
        # As the matrix units: 16 inputs at a time, whose products are exact, are added to the sums.
        pairs = zip(left.split(16, 1), self.right.memory.split(16, 0), strict=True)
        for some, weights in pairs:
            before = (before + some.double() @ weights.double()).float()
        self.sums = before


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

    def __init__(self, number: tuple[int, ...], seed: int = 0) -> None:
        self.number, self.has_waited, self.copies = number, False, 0
        self.partitions = Partitions(seed)
        self.products_of: defaultdict[int, list[Product]] = defaultdict(list)
        self.barriers: list[Barrier] = []

    @property
    def products(self) -> list[Product]:
        """Products of the partition that runs which nobody waited for."""
        return self.products_of[self.partitions.number]

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared | Barriers:
        if dtype == torch.int64:
            barriers = Barriers(Barrier() for _ in range(shape[0]))
            self.barriers += barriers
            return barriers
        return Shared(torch.full(shape, _poison(dtype), dtype=dtype))

    def copy(
        self, of: Descriptor, place: list[int], barrier: Barrier, to: Shared, pred: bool = True
    ) -> None:
        if pred:
            assert self.has_waited or not of.is_written_before, "reads rows before its wait"
            assert list(to.memory.shape) == list(of.block_shape)
            self.copies += 1
            to.memory.fill_(_poison(to.dtype))
            barrier.copies.append((to.memory, of.block(place)))

    def expect(self, barrier: Barrier, size: int, pred: bool = True) -> None:
        if pred:
            assert barrier.expected is None, "asks for a place again before it waited for it"
            barrier.expected = size
            barrier.arrive()

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = count

    def arrive(self, barrier: Barrier, count: int) -> None:
        assert count == 1
        barrier.arrive()

    def wait_at(self, barrier: Barrier, phase: int) -> None:
        self.partitions.wait(lambda: barrier.is_over(phase))

    def specialize(
        self,
        parts: list[tuple[Callable[..., None], tuple[Any, ...]]],
        warps: list[int],
        registers: list[int],
    ) -> None:
        assert len(warps) == len(registers) == len(parts) - 1
        self.partitions.run([partial(function, *arguments) for function, arguments in parts])

    def multiply(
        self, left: Shared, right: Shared, before: Any, is_async: bool, use_acc: bool = True
    ) -> Product:
        before = before if use_acc else torch.zeros_like(before)
        self.products.append(Product(left, right, before))
        return self.products[-1]

    def wait(self, running: int, deps: tuple[Any, ...]) -> Any:
        while len(self.products) > running:
            self.products.pop(0).compute()
        # What is not there yet stays a `Product`, with which nothing can be computed.
        is_there = [isinstance(d, Product) and d.sums is not None for d in deps]
        deps = tuple(d.sums if there else d for d, there in zip(deps, is_there, strict=True))
        return deps[0] if len(deps) == 1 else deps

    def wait_for_previous(self) -> None:
        self.has_waited = True

    def end(self) -> None:
        assert not any(self.products_of.values()), "ends with products on their way"
        assert not any(b.copies or b.expected for b in self.barriers), "ends with copies underway"

    def names(self) -> dict[str, Any]:
        """Replacements of a kernel's globals."""
        gl = SimpleNamespace(
            program_id=self.number.__getitem__, static_range=range, full=_full, where=_where,
            sigmoid=torch.sigmoid,
            arange=lambda start, end, layout: torch.arange(start, end), load=_load, store=_store,
            exp=torch.exp, exp2=_exp2, fma=_fma, cast=_cast,
            float32=torch.float32, int32=torch.int32,
            maximum=_pair(torch.maximum), minimum=_pair(torch.minimum), max=torch.amax,
            int64=torch.int64, float8e4nv=torch.float8_e4m3fn,
            PropagateNan=SimpleNamespace(ALL=None),
            allocate_shared_memory=self.allocate, zeros_like=torch.zeros_like,
            associative_scan=lambda value, axis, _: value.cumsum(axis),
            inline_asm_elementwise=_inline_asm, DotOperandLayout=_none, abs=torch.abs,
            float16=torch.float16, bfloat16=torch.bfloat16,
            join=lambda one, other: torch.stack((one, other), -1),
            warp_specialize=self.specialize,
            SliceLayout=_none, NVMMADistributedLayout=_none, BlockedLayout=_none, rsqrt=torch.rsqrt,
            NVMMASharedLayout=_none, num_warps=lambda: 4,
            zeros=lambda shape, dtype, layout: torch.zeros(shape), sum=torch.sum,
            thread_barrier=_none, atomic_add=_atomic_add,
            div_rn=torch.div,
            convert_layout=lambda value, layout: value, split=lambda value: value.unbind(-1),
        )  # fmt: skip
        return {
            "gl": gl,
            "tl": gl,
            "tma": SimpleNamespace(async_copy_global_to_shared=self.copy),
            "mbarrier": SimpleNamespace(
                init=self.init,
                expect=self.expect,
                wait=self.wait_at,
                arrive=self.arrive,
                MBarrierLayout=_none,
            ),
            "fence_async_shared": _none,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_init": lambda sums: sums,
            "warpgroup_mma_wait": self.wait,
            "gdc_wait": self.wait_for_previous,
            "gdc_launch_dependents": _none,
        }


def _poison(dtype: torch.dtype) -> float:
    """NaN; of whole numbers bytes that are NaN in e4m3."""
    return torch.nan if dtype.is_floating_point else 0x7F7F7F7F


def _inline_asm(code: str, _registers: str, values: list[Tensor], **_: Any) -> Any:
    """Words of four e4m3 to two of two float16; all other code moves its value."""
    if "cvt.rn.f16x2.e4m3x2" not in code:
        return values[0]
    (words,) = values
    order = (0, 2, 1, 3) if "prmt.b32 t, $2, 0, 0x3120" in code else (0, 1, 2, 3)
    numbers = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))[..., order]
    halves = numbers.contiguous().view(torch.float8_e4m3fn).to(torch.float16).view(torch.int32)
    return halves[..., 0], halves[..., 1]


def _none(*_: Any, **__: Any) -> None:
    return None


def _full(shape: list[int], value: float, dtype: torch.dtype, layout: Any) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


def _where(condition: Any, one: Any, other: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, one, other)
    return one if condition else other


def _exp2(value: Tensor) -> Tensor:
    """NumPy's, as Triton's interpreter has it: torch's may differ in its last bit."""
    return torch.from_numpy(np.exp2(value.numpy()))


def _fma(one: Tensor, other: Any, added: Any) -> Tensor:
    """With two roundings, as Triton's interpreter."""
    return one * other + added


def _cast(value: Tensor, dtype: torch.dtype, bitcast: bool) -> Tensor:
    return value.view(dtype) if bitcast else value.to(dtype)


def _pair(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The function for numbers too."""
    return lambda one, other, propagate_nan=None: function(
        torch.as_tensor(one), torch.as_tensor(other)
    )


def _load(
    pointer: Pointer, mask: Any = True, other: float = 0.0, cache_modifier: str = ""
) -> Tensor:
    place, mask = torch.broadcast_tensors(torch.as_tensor(pointer.place), torch.as_tensor(mask))
    found = torch.full(place.shape, other, dtype=pointer.memory.dtype)
    found[mask] = pointer.elements[place[mask]]
    return found


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    place, mask = torch.broadcast_tensors(torch.as_tensor(pointer.place), torch.as_tensor(mask))
    if not pointer.is_stored_again:
        assert pointer.elements[place[mask]].isnan().all(), "an output is written twice"
    value = torch.as_tensor(value, dtype=pointer.memory.dtype).expand(place.shape)
    pointer.elements[place[mask]] = value[mask]


def _atomic_add(pointer: Pointer, value: int, sem: str) -> Tensor:
    assert sem == "acq_rel"
    before = pointer.elements[pointer.place].clone()
    pointer.elements[pointer.place] += value
    return before


def _as_python(
    fn: FunctionType, gluon: dict[str, Any], done: dict[str, dict[str, Any]]
) -> FunctionType:
    """The function with `gluon` (by name) in the place of Gluon, and so those of ours that it
    calls; `done` has the names of each module so far."""
    module = fn.__module__
    if module not in done:
        done[module] = names = fn.__globals__ | gluon
        for name, value in fn.__globals__.items():
            if isinstance(value, constexpr):
                names[name] = value.value
            elif isinstance(value, JITCallable) and name not in gluon:
                names[name] = _as_python(value.fn, gluon, done)
    return FunctionType(fn.__code__, done[module], fn.__name__, fn.__defaults__)


@dataclass
class EmulatedKernel:
    """Takes a kernel's place in its module. Arguments `written_before` may be descriptors of what
    the kernel before writes, and those `stored_again` point to what a launch finds as an earlier
    one left it; all others that are written hold NaN. Programs and partitions run in an order drawn
    by `seed`."""

    module: ModuleType
    name: str
    written_before: tuple[int, ...] = (0,)
    stored_again: tuple[int, ...] = ()
    seed: int = 0
    copies: int = 0
    """Copies that all programs so far asked for."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            numbers = list(itertools.product(*map(range, grid)))
            random.Random(self.seed).shuffle(numbers)
            for number in numbers:
                program = Program(number, self.seed)
                kernel = _as_python(self.original.fn, program.names(), {})
                values: list[Any] = []
                for value in arguments:
                    if isinstance(value, TensorDescriptor):
                        value = Descriptor(value, len(values) in self.written_before)
                    if isinstance(value, Tensor):
                        value = Pointer(value, is_stored_again=len(values) in self.stored_again)
                    values.append(value)
                kernel(*values, **constants)
                program.end()
                self.copies += program.copies

        return launch

    def __post_init__(self) -> None:
        self.original = getattr(self.module, self.name)


class Partitions:
    """Threads of which one runs at a time; `seed` draws their order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._waits: dict[int, Callable[[], bool]] = {}
        self._running: int | None = None
        self._error: BaseException | None = None
        self._number = threading.local()

    @property
    def number(self) -> int:
        """Number of the partition that runs; 0 outside of `run`."""
        return getattr(self._number, "value", 0)

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run all to their ends; raises what the first of them raised."""
        self._waits = dict.fromkeys(range(len(functions)), lambda: True)
        threads = [
            threading.Thread(target=self._run_one, args=(number, function), daemon=True)
            for number, function in enumerate(functions)
        ]
        self._next()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait(self, holds: Callable[[], bool]) -> None:
        """Hand over until `holds`; outside of `run` it must hold."""
        if self._running is None:
            assert holds(), "waits for what nobody does"
            return
        if holds() and self._random.random() < 0.5:
            return
        number = self.number
        with self._changed:
            self._waits[number] = holds
            self._next()
            self._take(number)

    def _take(self, number: int) -> None:
        self._changed.wait_for(lambda: self._running == number or self._error is not None)
        if self._error is not None:
            raise SystemExit
        del self._waits[number]

    def _next(self) -> None:
        ready = [number for number, holds in self._waits.items() if holds()]
        if self._waits and not ready:
            self._error = AssertionError(f"partitions {sorted(self._waits)} wait for each other")
        self._running = self._random.choice(ready) if ready else None
        with self._changed:
            self._changed.notify_all()

    def _run_one(self, number: int, function: Callable[[], None]) -> None:
        self._number.value = number
        try:
            with self._changed:
                self._take(number)
            function()
        except SystemExit:
            return
        except BaseException as error:
            self._error = self._error or error
        with self._changed:
            self._next()
