"""What the GPU does at most: from it follows the least time that a kernel can take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BANDWIDTH = 4.3e12
"""Bytes a second that a large copy moves on an H200, reads and writes together; measured."""
MATRIX_RATE = 790e12
"""Operations a second (a multiplication and its addition are two) of a large dense bfloat16 product
of cuBLAS on an H200; measured. The data sheet's peak is 989e12, which no product reaches."""
CACHE_BYTES = 120e6
"""Twice the L2 cache of an H200: what goes through more bytes than this finds none of them there
when it begins again."""


class Need(NamedTuple):
    """What one layer, or one call, cannot do without.

    Attributes:
        moved: bytes read from and written to memory.
        operations: of the matrix units.
    """

    moved: float
    operations: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """Rates of a GPU.

    Attributes:
        bandwidth: bytes a second.
        matrix_rate: operations a second.
    """

    bandwidth: float = BANDWIDTH
    matrix_rate: float = MATRIX_RATE

    def floor_us(self, need: Need) -> float:
        """The larger of the two times that the bytes and the operations take, microseconds."""
        return max(need.moved / self.bandwidth, need.operations / self.matrix_rate) * 1e6
