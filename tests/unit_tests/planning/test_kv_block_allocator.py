"""Owners of blocks, and the hashes of blocks: what they cover, and their exact bytes."""

import hashlib
import struct
from collections import Counter

import numpy as np
import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.planning.kv_block_allocator import KVBlockAllocator
from megatron_async.planning.prefix_hashes import block_hashes

TOTAL = 20


def ids(*blocks):
    return np.array(blocks, dtype=np.int32)


def test_lowest_ids_first_and_back_again():
    blocks = KVBlockAllocator(6)
    first, second = blocks.allocate(2), blocks.allocate(3)
    assert sorted(first) == [0, 1]
    assert sorted(second) == [2, 3, 4]
    assert blocks.free == blocks.allocatable == 1
    blocks.release(first)
    assert blocks.free == 3
    assert sorted(blocks.allocate(3)) == [0, 1, 5]
    assert len(blocks.allocate(0)) == 0


def test_what_was_handed_out_is_the_callers_own():
    blocks = KVBlockAllocator(4)
    taken = blocks.allocate(2)
    kept = taken.copy()
    blocks.release(taken)
    blocks.allocate(4)
    assert np.array_equal(taken, kept)


def test_a_shared_block_is_free_when_its_last_owner_is_gone():
    blocks = KVBlockAllocator(4)
    table = blocks.allocate(3)
    blocks.share(table[:2])
    assert blocks.has_shared
    assert blocks.count_held([table, table[:2]]) == 3
    blocks.release(table)
    assert blocks.free == 2
    assert not blocks.has_shared
    blocks.release(table[:2])
    assert blocks.free == 4


def test_remembered_blocks_are_the_last_to_go_and_the_oldest_first():
    blocks = KVBlockAllocator(4)
    first, second = blocks.allocate(2), blocks.allocate(1)
    blocks.remember(np.concatenate((first, second)))
    blocks.release(second)
    blocks.release(first)
    assert (blocks.free, blocks.cached, blocks.allocatable) == (1, 3, 4)
    blocks.share(second)  # a hit: it has an owner again
    assert (blocks.cached, blocks.owners[second[0]]) == (2, 1)
    # The end of a sequence before its beginning.
    assert sorted(blocks.allocate(2)) == sorted([3, first[1]])
    assert blocks.forgotten == [first[1]]
    blocks.forget(first[:1])
    assert (blocks.free, blocks.cached) == (1, 0)
    blocks.forget(second)
    blocks.release(second)
    assert (blocks.free, blocks.cached) == (2, 0)


@pytest.mark.parametrize("seed", range(8))
def test_random_owners(seed):
    """Against books of the simplest kind: owners of blocks, and what is remembered.

    Break one of these, and it fails:

    - `release`: push blocks that still have an owner
    - `share`: leave a cached block in the order of those to be forgotten
    - `allocate`: hand out cached blocks before free ones
    - `forget`: do not push a block that nobody owns
    """
    rng = np.random.default_rng(seed)
    blocks, tables, remembered = KVBlockAllocator(TOTAL), [], set()
    for _ in range(600):
        kind = rng.integers(5)
        if kind == 0 and tables:
            blocks.release(tables.pop(int(rng.integers(len(tables)))))
        elif kind == 1:
            free = blocks.free
            fresh = blocks.allocate(int(rng.integers(0, min(blocks.allocatable, 6) + 1)))
            taken = blocks.forgotten
            assert len(taken) == max(len(fresh) - free, 0), "a cached block before a free one"
            assert set(taken) <= remembered
            remembered -= set(taken)
            blocks.forgotten = []
            tables.append(fresh)
        elif kind == 2:
            owned = {int(b) for table in tables for b in table}
            known = sorted(owned | remembered)
            hit = rng.permutation(known)[: int(rng.integers(0, 5))].astype(np.int32)
            blocks.share(hit)
            tables.append(hit)
        elif kind == 3 and tables:
            table = tables[int(rng.integers(len(tables)))]
            blocks.remember(table)
            remembered |= set(table.tolist())
        elif kind == 4 and remembered:
            lost = rng.permutation(sorted(remembered))[: int(rng.integers(1, 4))]
            blocks.forget(lost.astype(np.int32))
            remembered -= set(lost.tolist())
        owners = Counter(int(b) for table in tables for b in table)
        assert [owners[b] for b in range(TOTAL)] == blocks.owners.tolist()
        nobodys = {b for b in range(TOTAL) if not owners[b]}
        assert blocks.allocatable == len(nobodys)
        assert blocks.cached == len(nobodys & remembered)
        ownerless = blocks.ownerless_blocks().tolist()
        assert sorted(ownerless) == sorted(nobodys)
        assert set(ownerless[: blocks.free]) == nobodys - remembered
        assert blocks.has_shared == (max(owners.values(), default=0) > 1)
        assert blocks.count_held(tables) == len(owners)


def test_misuse_is_noticed():
    blocks = KVBlockAllocator(3)
    with pytest.raises(AssertionError, match="4 blocks asked for, 3 there"):
        blocks.allocate(4)
    with pytest.raises(AssertionError, match="a block is released that nobody owns"):
        blocks.release(ids(0))
    with pytest.raises(AssertionError, match="a free block cannot be shared"):
        blocks.share(ids(0))
    with pytest.raises(AssertionError, match="a block without an owner is remembered"):
        blocks.remember(ids(1))


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
