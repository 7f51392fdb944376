"""The stack of free blocks."""

import numpy as np
import pytest

from megatron_async.contexts.kv_block_allocator import KVBlockAllocator


def test_lowest_ids_first_and_back_again():
    blocks = KVBlockAllocator(6)
    first, second = blocks.allocate(2), blocks.allocate(3)
    assert sorted(first) == [0, 1]
    assert sorted(second) == [2, 3, 4]
    assert blocks.allocatable == 1
    blocks.release(first)
    assert blocks.allocatable == 3
    assert sorted(blocks.allocate(3)) == [0, 1, 5]
    assert len(blocks.allocate(0)) == 0


def test_what_was_handed_out_is_the_callers_own():
    blocks = KVBlockAllocator(4)
    taken = blocks.allocate(2)
    kept = taken.copy()
    blocks.release(taken)
    blocks.allocate(4)
    assert np.array_equal(taken, kept)


@pytest.mark.parametrize("seed", range(5))
def test_never_two_owners(seed):
    rng = np.random.default_rng(seed)
    blocks, owned = KVBlockAllocator(20), []
    for _ in range(300):
        if owned and rng.random() < 0.5:
            blocks.release(owned.pop(int(rng.integers(len(owned)))))
        else:
            owned.append(blocks.allocate(int(rng.integers(0, blocks.allocatable + 1))))
        ids = np.concatenate([*owned, blocks.free_blocks()])
        assert sorted(ids) == list(range(20))


def test_misuse_is_noticed():
    blocks = KVBlockAllocator(3)
    with pytest.raises(AssertionError, match="4 blocks asked for, 3 free"):
        blocks.allocate(4)
    with pytest.raises(AssertionError, match="more blocks released than exist"):
        blocks.release(np.array([0], np.int32))
