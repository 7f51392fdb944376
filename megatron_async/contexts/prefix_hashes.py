"""Hashes of blocks of tokens: each stands for its block and all blocks before it."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from megatron_async.contexts.step_plan import IntArray

DIGEST_BYTES = 16
"""128 bits: two different prefixes among 2^40 blocks have the same hash with a chance of 2^-49."""


def block_hashes(
    tokens: IntArray, block_size: int, salt: bytes = b"", parent: bytes = b""
) -> list[bytes]:
    """Hashes of the full blocks of a sequence, 16 bytes each.

    Args:
        tokens: integers `[n]`; what is behind the last full block is left out.
        block_size: tokens of a block.
        salt: sequences of different salts have no hash in common.
        parent: hash of the block before `tokens`; empty: they begin the sequence.
    """
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    size = 4 * block_size
    last = parent or blake2b(salt, digest_size=DIGEST_BYTES).digest()
    found = []
    for begin in range(0, len(data) - size + 1, size):
        last = blake2b(last + data[begin : begin + size], digest_size=DIGEST_BYTES).digest()
        found.append(last)
    return found
