"""Hashes of blocks: what they cover, and their exact bytes, on which engine and routing agree."""

import hashlib
import struct

import numpy as np
import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.planning.prefix_hashes import block_hashes


def digest(data):
    return hashlib.blake2b(data, digest_size=16).digest()


def test_the_bytes_are_as_they_are_described():
    first = digest(digest(b"salt") + struct.pack("<3i", 1, 2, 2**31 - 1))
    second = digest(first + struct.pack("<3i", 4, 5, 6))
    tokens = np.array([1, 2, 2**31 - 1, 4, 5, 6, 7, 8])
    assert block_hashes(tokens, 3, b"salt") == [first, second]
    assert block_hashes(tokens[:3], 3)[0] == digest(digest(b"") + struct.pack("<3i", *tokens[:3]))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, ">i4", np.uint16])
def test_the_type_and_layout_of_the_ids_do_not_matter(dtype):
    wide = np.arange(40).astype(dtype)
    assert block_hashes(wide[::2], 4) == block_hashes(np.arange(0, 40, 2, dtype=np.int32), 4)


def test_a_hash_covers_everything_before():
    tokens = np.arange(64)
    hashes = block_hashes(tokens, 8)
    assert len(hashes) == len(set(hashes)) == 8
    other = tokens.copy()
    other[20] += 1
    assert [a == b for a, b in zip(hashes, block_hashes(other, 8))] == [True] * 2 + [False] * 6
    assert not set(hashes) & set(block_hashes(tokens, 8, b"another"))
    assert block_hashes(tokens[:63], 8) == hashes[:7], "a partial block has none"
    assert block_hashes(tokens[:7], 8) == []
    assert block_hashes(tokens[:0], 8) == []


@pytest.mark.parametrize("salt", [b"", b"salt"])
def test_a_sequence_can_be_continued(salt):
    tokens = np.arange(64)
    whole = block_hashes(tokens, 8, salt)
    for cut in (1, 3, 8):
        rest = block_hashes(tokens[8 * cut :], 8, salt, parent=whole[cut - 1])
        assert whole[:cut] + rest == whole


def test_what_cannot_be_hashed_is_named():
    with pytest.raises(ConfigurationError, match="block_size=0"):
        block_hashes(np.arange(4), 0)
    with pytest.raises(ConfigurationError, match="16 bytes"):
        block_hashes(np.arange(4), 2, parent=b"short")
