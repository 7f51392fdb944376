"""`Helpers`: threads that stay awake between the products of a step, and take part in each.

A step of a small model has some hundred products of 30 to 500 microseconds. To wake a thread costs
as much as the shorter ones take. So a helper that has no work looks for it for a while, in compiled
code without Python's lock, and then sleeps; its waker then goes on alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_async.ops.linear.cpu.weight_record import WeightRecord

PATIENCE = 400_000
"""Turns of a helper without work before it sleeps: some 12 to 20 ms, 31 nanoseconds each on a Zen 3
EPYC and 40 to 50 on a Xeon. From a step's last product to the next step's first one it is 1 to 3
ms; with 20,000 turns the helper was asleep at half of the steps and more, and a run of eight rows
took 12 to 25 % longer (docs/records/cpu_throughput.md, 2026-11-27)."""
CHUNK_BYTES = 2**16
"""Bytes of weights that a thread takes at a time."""
LEAST_SHARED = 2**17
"""Bytes of weights from which on a product is shared."""
KEPT_BYTES = 2**20
"""Bytes of scratch memory that wait for the next product; more is given back after each."""


class _Desk:
    """What one product at a time works with: `control`, what its threads tell each other."""

    def __init__(self) -> None:
        from megatron_async.ops.linear.cpu.atomics import CONTROL_BYTES

        self.control = np.zeros(CONTROL_BYTES // 8, np.int64)
        self.address = self.control.ctypes.data
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def scratch(self, num_bytes: int) -> Tensor:
        """At least so much memory, the caller's until the product is done."""
        if num_bytes <= self._scratch.numel():
            return self._scratch
        scratch = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes <= KEPT_BYTES:
            self._scratch = scratch
        return scratch


class _Alone(threading.local):
    """The desk of each thread that computes alone."""

    def __init__(self) -> None:
        self.desk = _Desk()


class Helpers:
    """Threads beside the caller's, which take part in the jobs of `jobs.py`.

    Args:
        count: of helpers; 0: every product is the caller's alone.
    """

    def __init__(self, count: int) -> None:
        from megatron_async.ops.linear.cpu import jobs

        self._jobs, self._count, self._desk = jobs, count, _Desk()
        self._least = LEAST_SHARED if count else jobs.NEVER
        self._lock, self._alone = threading.Lock(), _Alone()
        self._wake = [threading.Event() for _ in range(count)]
        for number, event in enumerate(self._wake):
            name = f"integer_products-{number}"
            threading.Thread(target=self._help, args=(event,), name=name, daemon=True).start()

    def product(
        self, x: int, rows: int, k: int, weight: int, blocks: int, record: WeightRecord, out: int
    ) -> None:
        """`jobs.product` on as many threads as are free; any thread may call it."""
        from megatron_async.ops.linear.cpu import integer_products

        num_bytes = integer_products.scratch_bytes(rows, k)
        told, of_block = record.address, record.block_bytes(k)
        # Two threads may compute at once, those of two engines: one of them does so alone.
        if blocks * of_block < self._least or not self._lock.acquire(blocking=False):
            desk = self._alone.desk
            scratch = desk.scratch(num_bytes)
            self._jobs.product(
                desk.address, scratch.data_ptr(), x, rows, k, weight, blocks, told, out, blocks
            )
            return
        try:
            self._rouse()
            size = max(CHUNK_BYTES // of_block, 1)
            scratch = self._desk.scratch(num_bytes)
            self._jobs.product(
                self._desk.address, scratch.data_ptr(), x, rows, k, weight, blocks, told, out,
                size,
            )  # fmt: skip
        finally:
            self._lock.release()

    @contextmanager
    def held(self) -> Iterator[tuple[int, int]]:
        """For a call that does many jobs: helpers stay awake until it is over.

        Yields:
            the address of the control for functions of `jobs.py`, and the bytes of weights from
            which on a product is to be shared; `jobs.NEVER`: this thread computes alone.
        """
        from megatron_async.ops.linear.cpu import jobs

        if not self._count or not self._lock.acquire(blocking=False):
            yield self._alone.desk.address, jobs.NEVER
            return
        try:
            self._desk.control[jobs.HELD // 8] = 1
            self._rouse()
            yield self._desk.address, self._least
        finally:
            self._desk.control[jobs.HELD // 8] = 0
            self._lock.release()

    @property
    def awake(self) -> int:
        """Helpers that look for work, or do some."""
        return int(self._desk.control[self._jobs.AWAKE // 8])

    def _rouse(self) -> None:
        if self.awake < self._count:
            for event in self._wake:
                event.set()

    def _help(self, event: threading.Event) -> None:
        while True:
            event.wait()
            event.clear()
            self._jobs.serve(self._desk.address, PATIENCE)


@cache
def helpers_of(threads: int) -> Helpers:
    """The process's helpers where so many threads compute, the caller's among them."""
    return Helpers(threads - 1)


# A forked process has no threads but the one that forked.
os.register_at_fork(after_in_child=helpers_of.cache_clear)


@cache
def compile_products() -> None:
    """Compile the loops, so that no first step does."""
    from megatron_async.ops.linear.cpu import integer_products, integer_tile, jobs, weight_record

    desk, numbers = _Desk(), torch.zeros(64)
    scratch, place = desk.scratch(integer_products.scratch_bytes(1, 16)), numbers.data_ptr()
    record = weight_record.WeightRecord(integer_tile.OUTPUTS, 128, place).address
    jobs.product(desk.address, scratch.data_ptr(), place, 1, 16, place, 1, record, place, 1)
    jobs.serve(desk.address, 0)
