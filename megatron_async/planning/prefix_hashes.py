"""`block_hashes`: hashes of KV blocks by content, so that equal beginnings have equal hashes.

The hash of a block covers its own tokens and, by the hash of the block before, all tokens before
them. The engine's prefix cache and the coordinator's routing (`serving/routing.py`) use the same
function, so both mean the same by a block. Chained hashes of full blocks are vLLM's idea (its
design page "Automatic Prefix Caching"). 128 bits make a collision by chance impossible in
practice, and blake2b one that is made on purpose; the engine compares the tokens all the same.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from megatron_async.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_async.planning.step_plan import IntArray

DIGEST_BYTES = 16
"""Bytes of a hash."""


def block_hashes(
    tokens: IntArray, block_size: int, salt: bytes = b"", parent: bytes = b""
) -> list[bytes]:
    """A hash of each full block of a sequence, in order; a partial block at the end has none.

    A hash is blake2b, 16 bytes, of the hash before and the block's token ids as int32, little
    endian. The hash before the first block is the salt's.

    Args:
        tokens: token ids `[tokens]` on the CPU, any integer type; each must fit int32.
        block_size: tokens in a block.
        salt: sequences of different salts share no hash.
        parent: hash of the block before `tokens`, where these continue a sequence; the salt is
            then part of it already, and not looked at. b"": `tokens` begin the sequence.

    Raises:
        ConfigurationError: block_size is below 1, or `parent` is no hash.
    """
    if block_size < 1:
        raise ConfigurationError(f"block_size={block_size} must be at least 1 token.")
    if parent and len(parent) != DIGEST_BYTES:
        raise ConfigurationError(
            f"parent={parent!r} has {len(parent)} bytes: give a hash of {DIGEST_BYTES} bytes that "
            'this function returned, or b"" at the beginning of a sequence.'
        )
    before = parent or _digest(salt)
    data = memoryview(np.ascontiguousarray(tokens, dtype="<i4")).cast("B")
    size = 4 * block_size
    found: list[bytes] = []
    for start in range(0, len(data) - size + 1, size):
        block = hashlib.blake2b(before, digest_size=DIGEST_BYTES)
        block.update(data[start : start + size])
        before = block.digest()
        found.append(before)
    return found


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
