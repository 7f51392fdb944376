"""Which part of which row each program of the decode kernel takes."""

import random

import pytest
import torch

from megatron_async.ops.attention.decode_schedule import FULL, DecodeSchedule
from tests.unit_tests.ops.attention.decode_batch import processors
from tests.unit_tests.ops.attention.schedule_reference import decode_schedule_reference


@pytest.mark.parametrize(("count", "kv_heads"), [(132, 8), (132, 3), (7, 1), (1, 8)])
@pytest.mark.parametrize(("tile", "part"), [(64, 0), (32, 0), (64, 512)])
def test_schedule(count, kv_heads, tile, part, device):
    """Every token of every row once, as the reference says, within the bounds that memory is
    sized by."""
    draw = random.Random(count + tile)
    with processors(count):
        schedule = DecodeSchedule(70, kv_heads, tile, device, part, 100_000)
    for rows, longest in ((1, 0), (1, 1), (1, 100_000), (70, 400), (64, 64), (33, 5000), (70, 1)):
        lengths = [draw.randint(longest // 2, longest) for _ in range(rows)]
        if rows == 64:
            lengths[9] = 32_768  # one long row
        schedule.items.fill_(2**30)
        schedule.splits.fill_(2**30)
        schedule.update(torch.tensor(lengths, dtype=torch.int32, device=device))
        items = [tuple(item) for item in schedule.items.tolist()]
        splits = [tuple(split) for split in schedule.splits.tolist()]
        expected_items, expected_splits = decode_schedule_reference(
            lengths, schedule.shares, tile, part
        )
        used = len(expected_items)
        assert items[:used] == expected_items
        assert schedule.is_full == (rows * kv_heads > FULL * count)
        assert schedule.shares <= schedule.extra
        assert used <= rows + schedule.shares
        unused = items[used : rows + schedule.shares]
        assert all(item[:3] == (-1, 0, 0) for item in unused)
        assert splits[:rows] == expected_splits
        assert set(splits[rows:]) <= {(2**30, 2**30)}, "of no row"
        slots = []
        for _row, start, end, slot in expected_items:
            if slot >= 0:
                slots += range(slot, slot + (-(-(end - start) // part) if part else 1))
        assert slots == list(range(len(slots)))
        assert len(slots) <= schedule.slots
        # A whole row, or the parts of one, from its first token to its last.
        ends = {}
        for row, start, end, _slot in expected_items:
            assert start == ends.get(row, 0)
            assert start % (part or tile) == 0
            ends[row] = end
        assert ends == dict(enumerate(lengths))
        begun = [lengths[item[0]] for item in items[:used]]
        assert begun == sorted(begun, reverse=True), "a shorter row begins before a longer one"


@pytest.mark.parametrize("present", [0, 1, 33, 70, 900])
def test_rows_from_the_limit_on_have_no_items(present, device):
    """Lengths of such rows are any numbers, and take nobody's share."""
    with processors(7):
        schedule = DecodeSchedule(70, 8, 64, device)
    lengths = [1 + 97 * row % 1000 for row in range(70)]
    limit = torch.tensor([present, -1], dtype=torch.int32, device=device)
    schedule.items.fill_(2**30)
    schedule.update(torch.tensor(lengths, dtype=torch.int32, device=device), limit)
    items, splits = decode_schedule_reference(lengths[:present], schedule.shares, 64)
    found = [tuple(item) for item in schedule.items[: 70 + schedule.shares].tolist()]
    assert found[: len(items)] == items
    assert all(item[:3] == (-1, 0, 0) for item in found[len(items) :])
    whole = [(-1, 1)] * (70 - len(splits))
    assert [tuple(split) for split in schedule.splits.tolist()] == splits + whole


def test_long_row_is_cut_and_short_ones_are_not(device):
    with processors(132):
        schedule = DecodeSchedule(64, 8, 64, device)
    lengths = [256] * 63 + [32_768]
    items, splits = decode_schedule_reference(lengths, schedule.extra, 64)
    assert splits == [(-1, 1)] * 63 + [(0, len(items) - 63)]
    assert len(items) - 63 > 16


def test_parts_are_whole_tiles():
    with processors(7), pytest.raises(ValueError, match="parts of 100 tokens are not tiles of 64"):
        DecodeSchedule(70, 8, 64, torch.device("cpu"), part=100)
