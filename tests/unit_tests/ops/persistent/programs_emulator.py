"""Runs a persistent Gluon kernel on the CPU: programs that wait for each other's words.

Programs run one at a time, in an order drawn by a seed, until they wait for a word. Asynchronous
copies spoil their places at once, and are there when their program waits for their group. A program
that waits for ever, or reads a place that is still being copied, makes the run fail, or gives NaN.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from gluon_emulator import Pointer, Program, Shared, _as_python, _none
from gluon_partitions import Partitions
from torch import Tensor


@dataclass
class Words:
    """Values with their epochs, from a place on."""

    values: Tensor
    epochs: Tensor
    place: Any = 0

    @classmethod
    def zeros(cls, count: int) -> Words:
        return cls(torch.zeros(count), torch.zeros(count, dtype=torch.int64))

    def __add__(self, offset: Any) -> Words:
        return Words(self.values, self.epochs, self.place + offset)


class PersistentProgram(Program):
    """The functions of Gluon, as one of many programs calls them.

    Args:
        number: of the program.
        programs: runs them.
        weights: tensors by address.
    """

    def __init__(self, number: int, programs: Partitions, weights: dict[int, Tensor]) -> None:
        super().__init__((number,))
        self._programs, self._weights = programs, weights
        self._copies: list[tuple[Tensor, Tensor, Tensor]] = []
        self._groups: list[list[tuple[Tensor, Tensor, Tensor]]] = []

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        memory = torch.full(shape, torch.nan, dtype=dtype)
        return Shared(memory, memory.flatten())

    def receive(
        self, words: Words, index: Tensor, epoch: Any, wanted: Tensor, together: int
    ) -> Tensor:
        place = (words.place + index)[wanted]
        self._programs.wait(lambda: bool((words.epochs[place] == epoch).all()))
        found = torch.zeros(index.shape)
        found[wanted] = words.values[place]
        return found

    def send(self, words: Words, index: Tensor, value: Tensor, epoch: Any, wanted: Tensor) -> None:
        place = (words.place + index)[wanted]
        assert (words.epochs[place] < epoch).all(), "a word is sent twice"
        words.values[place], words.epochs[place] = value[wanted], int(epoch)

    def last_sent(self, words: Words, index: Tensor) -> Tensor:
        return words.values[words.place + index]

    def copy_here(self, shared: Shared, source: Pointer, mask: Any) -> None:
        place, mask = torch.broadcast_tensors(source.place, torch.as_tensor(mask))
        assert place.shape == shared.memory.shape
        value = source.elements[place[mask]].clone()
        shared.memory[mask] = torch.nan
        self._copies.append((shared.memory, mask, value))

    def end_group(self) -> None:
        self._groups.append(self._copies)
        self._copies = []

    def wait_group(self, running: int) -> None:
        while len(self._groups) > running:
            for memory, mask, value in self._groups.pop(0):
                memory[mask] = value

    def address_of(self, table: Pointer, layer: Any, column: int) -> Pointer:
        return Pointer(self._weights[int(table.elements[int(layer) * 6 + column])])

    def end(self) -> None:
        assert not self._copies + self._groups, "ends with copies on their way"

    def names(self) -> dict[str, Any]:
        found = super().names()
        more = {
            "bfloat16": torch.bfloat16, "SwizzledSharedLayout": _none, "log2": torch.log2,
            "cast": lambda value, dtype: torch.as_tensor(value).to(dtype),
            "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        }  # fmt: skip
        copies = {
            "async_copy_global_to_shared": self.copy_here,
            "commit_group": self.end_group,
            "wait_group": self.wait_group,
        }
        return found | {
            "gl": SimpleNamespace(**vars(found["gl"]) | more),
            "async_copy": SimpleNamespace(**copies),
            "address_of": self.address_of,
            "receive": self.receive,
            "send": self.send,
            "last_sent": self.last_sent,
            "range": _numbers,
        }


def _numbers(*bounds: Any) -> Iterator[Tensor]:
    """A loop's numbers, of which Gluon makes tensors."""
    return (torch.tensor(i) for i in builtins.range(*map(int, bounds)))


def run_programs(
    kernel: Any,
    programs: int,
    arguments: list[Any],
    constants: dict[str, Any],
    weights: dict[int, Tensor],
    stored_again: tuple[int, ...] = (),
    seed: int = 0,
) -> None:
    """Run a persistent kernel to its end; arguments that are written twice are `stored_again`."""
    order = Partitions(seed)
    running = [PersistentProgram(number, order, weights) for number in range(programs)]
    values = list(arguments)
    for number, value in enumerate(arguments):
        if isinstance(value, Tensor):
            values[number] = Pointer(value, is_stored_again=number in stored_again)
    order.run([
        (lambda one=one: _as_python(kernel.fn, one.names(), {})(*values, **constants))
        for one in running
    ])  # fmt: skip
    for one in running:
        one.end()
