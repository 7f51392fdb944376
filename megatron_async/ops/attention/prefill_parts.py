"""Parts of the keys of a few queries: a short chunk over a long sequence.

A tile of queries walks all of its keys, one tile of keys after the other. A chunk of few tokens has
few tiles of queries, and most of the device would wait for them. So their keys are divided among
more programs, and the last program of a tile of queries joins the parts, as flash-decoding does
(Dao et al. 2023). Which tiles have how many parts is decided on the device, by their lengths, so
that a captured step serves any chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS_A_PROCESSOR = 2
"""Programs that the parts of a step should make, if two fit a processor. Not measured yet; decode
attention's parts make as many (`decode_schedule.py`)."""
LEAST_KEYS = 512
"""Keys of a part. An estimate, not measured yet: some 8 microseconds of walking, where a partial
result and its share of the join take 3 to 6."""


class PrefillParts:
    """Partial results of prefill attention; made once, used by every layer in turn.

    Attributes:
        shares: units, tiles of queries and parts of them, that a KV head should have.
        output: float32 `[kv heads * shares, queries, dim]`, as each unit leaves it.
        maximum, total: float32 `[kv heads * shares, queries]`.
        arrived: int32 `[kv heads * shares]`: parts stored of the tile that begins at this unit;
            zeros between two launches.
    """

    def __init__(
        self, processors: int, kv_heads: int, queries: int, dim: int, device: torch.device
    ) -> None:
        """Args:
        processors: of the device.
        kv_heads: of the model; each makes a program of a unit.
        queries: of a tile.
        dim: size of a head.
        device: a GPU; or a CPU with Triton's interpreter.
        """
        self.processors, self.kv_heads, self.queries, self.dim = processors, kv_heads, queries, dim
        self.shares = self.shares_of(PROGRAMS_A_PROCESSOR)
        units = kv_heads * self.shares
        self.output = torch.empty((units, queries, dim), dtype=torch.float32, device=device)
        self.maximum = torch.empty((units, queries), dtype=torch.float32, device=device)
        self.total = torch.empty((units, queries), dtype=torch.float32, device=device)
        self.arrived = torch.zeros(units, dtype=torch.int32, device=device)

    def shares_of(self, programs: int) -> int:
        """Units of a KV head, if so many programs fit a processor."""
        return max(programs * self.processors // self.kv_heads, 1)


@triton.jit
def parts_of_rows(
    tiles: tl.tensor,
    lengths: tl.tensor,
    shares: tl.tensor,
    key_tile: tl.constexpr,
    least_keys: tl.constexpr,
) -> tl.tensor:
    """Parts of each tile of queries of a row, int32 `[rows]`, at least 1.

    All units together are `shares` at most; or no tile is divided, if there are as many tiles.

    Args:
        tiles: int32 `[rows]`: tiles of queries.
        lengths: int32 `[rows]`: keys.
        shares: units.
        key_tile: keys of a tile; parts are whole tiles.
        least_keys: of a part.
    """
    key_tiles = (lengths + key_tile - 1) // key_tile
    room = tl.maximum(shares - tl.sum(tiles, 0), 1)
    # A tile of queries has a part less than a full one at most, which `room` leaves out.
    largest = (tl.sum(tiles * key_tiles, 0) + room - 1) // room
    largest = tl.maximum(largest, least_keys // key_tile)
    return tl.maximum((key_tiles + largest - 1) // largest, 1)
