"""Run by test_unpack_step.py in a process of its own: kernels against their references."""

import sys

import torch

from megatron_async.ops import unpack_step as ops

where = sys.argv[1]
generator = torch.Generator().manual_seed(0)


def random(high, shape, dtype):
    return torch.randint(high, shape, generator=generator, dtype=dtype).to(where)


for rows, slots, blocks, block_size in ((1, 2, 1, 16), (5, 9, 7, 4), (130, 300, 140, 1)):
    table = random(1000, (slots, blocks), torch.int32)
    expected = table.clone()
    # Distinct pairs and, as in padding, one that stands often with the same block.
    pairs = torch.randperm(slots * blocks, generator=generator)[:rows].to(where)
    update_slots, indices = (pairs // blocks).int(), (pairs % blocks).int()
    values = random(1000, (rows,), torch.int32)
    update_slots[rows // 2 :], indices[rows // 2 :], values[rows // 2 :] = slots - 1, 0, 7
    keep = (update_slots * blocks + indices != (slots - 1) * blocks) | (values == 7)
    update = [x[keep].contiguous() for x in (update_slots, indices, values)]
    expected[update[0].long(), update[1].long()] = update[2]
    count = len(update[0])
    ops._update_kernel[(-(-count // 128),)](table, table.stride(0), *update, count, 128, False)
    assert torch.equal(table, expected)

    row_slots = random(slots, (rows,), torch.int32)
    kv_lengths = random(blocks * block_size, (rows,), torch.int32) + 1
    last_token = random(50000, (slots,), torch.int64)
    found, truth = (
        ops.StepRows.empty(rows + 3, blocks, torch.device(where)).head(rows) for _ in range(2)
    )
    for out in (found, truth):
        for field in vars(out).values():
            field.fill_(-5)
    inputs = (row_slots, kv_lengths, last_token, table)
    ops.unpack_rows_reference(*inputs, block_size, truth)
    ops._unpack_kernel[(rows, -(-blocks // 128))](
        *inputs, table.stride(0), *vars(found).values(), blocks, block_size, 128, False
    )
    for name in vars(truth):
        assert torch.equal(getattr(found, name), getattr(truth, name)), name

    distinct = torch.randperm(slots, generator=generator)[: min(rows, slots)].to(where)
    sampled = random(50000, (len(distinct),), torch.int64)
    ring = torch.zeros(3, rows + 2, dtype=torch.int32, device=where)
    entry = torch.tensor([2], dtype=torch.int32, device=where)
    expected_last, expected_ring = last_token.clone(), ring.clone()
    expected_last[distinct] = sampled
    expected_ring[2, : len(distinct)] = sampled.int()
    ops._feed_back_kernel[(-(-len(distinct) // 128),)](
        sampled, distinct, last_token, ring, ring.stride(0), entry, len(distinct), 128, False
    )
    assert torch.equal(last_token, expected_last)
    assert torch.equal(ring, expected_ring)
