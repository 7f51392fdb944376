"""The memory in which threads tell each other of a job, as numbers of 64 bits.

Imported only where loops are compiled.
"""

from __future__ import annotations

from numba.extending import register_jitable

from megatron_async.ops.linear.cpu import atomics

TICKET, FINISHED, AWAKE, HELD, JOB = range(0, 5 * 64, 64)
"""Bytes from the start of `control`, 64 apart so that no two share a cache line: the ticket; chunks
that are done; helpers that wait for a job; whether jobs follow each other in one call, so that
helpers do not lose patience; and the job's numbers."""
KIND, LENGTH, SIZE, *_rest = (JOB + 8 * number for number in range(3 + 20))
"""The job's numbers: its kind, its length, and what a chunk has of that."""
ARGUMENT = tuple(_rest)
"""The numbers of its kind."""
CONTROL_BYTES = ARGUMENT[-1] + 8


@register_jitable
def argument(control: int, number: int) -> int:
    """A number of the job's kind."""
    return atomics.read(control + JOB + 8 * (3 + number))
