"""Memory that compiled loops of several threads share: numbers read and written whole, in order;
and where in it threads tell each other of a job.

Imported only where loops are compiled. An address is an integer, as `array.ctypes.data` gives it;
the number there has 64 bits. Every access is sequentially consistent.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

ORDER = "seq_cst"
NUMBER = ir.IntType(64)
BYTES = 8
TICKET, FINISHED, AWAKE, HELD, JOB = range(0, 5 * 64, 64)
"""Bytes from the start of `control`, 64 apart so that no two share a cache line: the ticket; chunks
that are done; helpers that wait for a job; whether jobs follow each other in one call, so that
helpers do not lose patience; and the job's numbers."""
KIND, LENGTH, SIZE, *_rest = (JOB + 8 * number for number in range(3 + 20))
"""The job's numbers: its kind, its length, and what a chunk has of that."""
ARGUMENT = tuple(_rest)
"""The numbers of its kind."""
CONTROL_BYTES = ARGUMENT[-1] + 8


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, NUMBER.as_pointer())


@intrinsic
def read(typingctx: Any, address: Any) -> Any:
    """The number at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), ORDER, BYTES)

    return types.int64(types.int64), codegen


@intrinsic
def write(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a number at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), ORDER, BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def put(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a number that others read only after a later `write`: it takes no bus lock."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the number at an address; the number that was there before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], ORDER)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def swap_if(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Store a number if the expected one is there; whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], ORDER, ORDER)
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell an x86 core that this thread only waits: the other thread of the core may go on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        return context.get_dummy_value()

    return types.void(), codegen


@register_jitable
def argument(control: int, number: int) -> int:
    """A number of the job's kind."""
    return read(control + JOB + 8 * (3 + number))
