"""What loops know of a weight beside its numbers: a record of int64, by its address.

Imported only where loops are compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from numba.extending import register_jitable

from megatron_async.ops.cpu.row_kernels import longs

FIELDS = ("outputs", "bytes", "scales", "loop", "is_fine")
"""Outputs of a block; its bytes for each 32 inputs; the address of float32 scales, 0 for a
`GroupedWeight`, whose scales are beside its integers; the address of a `GroupedWeight`'s loop
(`group_products.loop_of`); whether rows have 16 bits there."""
OUTPUTS, BYTES, SCALES, LOOP, IS_FINE = range(len(FIELDS))
UNIT = 32
"""Inputs that `BYTES` is of."""


class WeightRecord:
    """A record, kept by the weight.

    Args:
        outputs, size, scales, loop, is_fine: `FIELDS`.
    """

    def __init__(
        self, outputs: int, size: int, scales: int = 0, loop: int = 0, is_fine: bool = False
    ) -> None:
        self._numbers = np.array([outputs, size, scales, loop, is_fine], np.int64)
        self._size, self.address = size, self._numbers.ctypes.data

    def block_bytes(self, k: int) -> int:
        """`block_bytes` of this weight."""
        return -(-k // UNIT) * self._size


@register_jitable
def field(record: Any, number: Any) -> Any:
    """A number of the record at an address."""
    return carray(longs(record), (len(FIELDS),))[number]


@register_jitable
def block_bytes(record: Any, k: Any) -> Any:
    """Bytes of a weight's block, of k inputs."""
    return (k + UNIT - 1) // UNIT * field(record, BYTES)
