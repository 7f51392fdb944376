"""The schedules of prefill and decode attention in plain Python."""

from types import SimpleNamespace

import torch

from megatron_async.ops.attention.prefill_schedule import LEAST_KEYS


def decode_schedule_reference(kv_lengths, shares, tile, part=0):
    """Decode attention's: items (row, first token, end, slot), and of each row the first slot and
    the number of parts, of `part` tokens where it is given."""
    tile = part or tile
    tokens = -(-sum(kv_lengths) // shares)
    largest = max(-(-tokens // tile), 1) * tile
    split, whole, slots = [], [], 0
    splits = [(-1, 1)] * len(kv_lengths)
    for row, length in sorted(enumerate(kv_lengths), key=lambda pair: -pair[1]):
        wanted = max(-(-length // largest), 1)
        share = max(-(-length // (wanted * tile)), 1) * tile
        starts = range(0, max(length, 1), share)
        if len(starts) == 1:
            whole.append((row, 0, length, -1))
            continue
        step = part or share
        splits[row] = (slots, -(-length // step))
        for start in starts:
            split.append((row, start, min(start + share, length), slots + start // step))
        slots += splits[row][1]
    return split + whole, splits


def parts_reference(chunks, group, tile, shares):
    """Parts of each tile of queries of each row, in plain Python: equal ones, or, if these are
    too many, as many as surely are not."""
    tiles = [-(-query * group // tile.queries) for query, _ in chunks]
    keys = [-(-kv // tile.keys) for _, kv in chunks]
    least = LEAST_KEYS // tile.keys
    work = sum(t * k for t, k in zip(tiles, keys, strict=True))
    for room in (shares, max(shares - sum(tiles), 1)):
        largest = max(-(-work // room), least)
        parts = [max(-(-k // largest), 1) for k in keys]
        if sum(t * p for t, p in zip(tiles, parts, strict=True)) <= shares:
            return parts
    assert parts == [1] * len(chunks)
    return parts


def schedule_reference(chunks, first, group, tile, shares):
    """Units in plain Python, but for those that have nothing to do behind the last."""
    parts_of = [1] * len(chunks) if not shares else parts_reference(chunks, group, tile, shares)
    units, start = [], first
    for row, ((query, length), parts) in enumerate(zip(chunks, parts_of, strict=True)):
        for first_query in range(0, query * group, tile.queries):
            last = length - query + (first_query + tile.queries - 1) // group
            tiles = min(last, length - 1) // tile.keys + 1
            used = min(parts, tiles)
            for part in reversed(range(parts)):
                share = part * tiles // used, (part + 1) * tiles // used
                what = (row, first_query, start, query, length, *share, part, used)
                units.append(what if part < used else None)
        start += query
    return units[::-1]


class ReferenceKernel:
    """Takes the place of `_schedule_kernel`, where Triton's interpreter does not run."""

    def __getitem__(self, grid):
        return self.launch

    @staticmethod
    def launch(
        kv_lengths, starts, units, rows, count, shares, *, divides, group, query_tile, key_tile, **_
    ):
        assert divides == (shares > 0)
        first = int(starts[0])
        chunks = list(zip(starts.diff().tolist(), kv_lengths.tolist(), strict=True))
        tile = SimpleNamespace(queries=query_tile, keys=key_tile)
        found = schedule_reference(chunks, first, group, tile, shares)
        assert rows == len(chunks)
        assert len(found) <= count == len(units)
        units[:, 0] = -1
        for unit, numbers in zip(units, found, strict=False):
            if numbers is not None:
                unit[: len(numbers)] = torch.tensor(numbers)
