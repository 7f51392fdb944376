"""Bases before and after a step, the kernel and the reference."""

import pytest
import torch

from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows
from tests.unit_tests.ops.recurrent import recurrent_layers

pytestmark = pytest.mark.usefixtures("poisoned_memory")
KERNELS, REFERENCES = recurrent_layers.KERNELS["mamba"], recurrent_layers.REFERENCES["mamba"]


def chunks(starts, firsts, writes, last, device="cpu"):
    def tensor(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    return PrefillRows(
        tensor(starts), tensor(firsts), tensor(writes), tensor(writes), tensor(last, torch.bool)
    )


def run(ops, found, rows, positions, width, prefill, rule, device="cpu"):
    base = torch.tensor(found, dtype=torch.int32, device=device)
    index = torch.tensor(rows, dtype=torch.int64, device=device)
    positions = torch.tensor(positions, dtype=torch.int64, device=device)
    before, after = ops.next_bases(base, index, positions, width, prefill, rule)
    assert before.dtype == after.dtype == torch.int32
    return base.tolist(), before.tolist(), after.tolist()


def check_the_rule(ops, device="cpu"):
    # Row 4 is the dummy row; row 0 flushes, row 1 does not yet, row 2 is at its limit.
    rule = FlushRule(16, 1)
    found = [16, 0, 32, 7, 0]
    rows, positions = [0, 1, 2, 4, 4], [33, 34, 16, 17, 0, 0, 0, 0, 0, 0]
    expected = [32, 0, 32, 7, 0], [16, 0, 32, 0, 0], [32, 0, 32, 0, 0]
    assert run(ops, found, rows, positions, 2, None, rule, device) == expected


def check_prefill(ops, device="cpu"):
    rule = FlushRule(16, 2)
    prefill = chunks(
        # 5..24 goes on, 0..2 ends, 30..33 ends: 32 is flushed only when 34 tokens are there.
        [0, 20, 23, 27, 30, 30],
        [5, 0, 30, 31, 0],
        [1, 0, 3, 5, 6],
        [False, True, True, True, True],
        device,
    )
    found = run(ops, [9] * 7, [2], [48], 1, prefill, rule, device)
    before, after = [9, 5, 0, 30, 31, 0], [32, 25, 0, 32, 32, 0]
    assert found == ([0, 25, 32, 32, 9, 32, 9], before, after)
    # With one token less it is not, and a chunk's state is not before the chunk.
    prefill = chunks([0, 3], [30], [0], [True], device)
    assert run(ops, [9], [], [], 1, prefill, rule, device) == ([30], [30], [30])


def test_reference():
    check_the_rule(REFERENCES)
    check_prefill(REFERENCES)


def test_kernel(device):
    check_the_rule(KERNELS, device)
    check_prefill(KERNELS, device)


def test_bad_input():
    base, none = torch.zeros(3, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    rows, positions = torch.tensor([0, 1]), torch.tensor([4, 5])
    for ops in (REFERENCES, KERNELS):
        with pytest.raises(ValueError, match="2 decode rows of 2 query tokens"):
            ops.next_bases(base, rows, positions, 2, None, FlushRule())
        with pytest.raises(ValueError, match="1 chunks want 2 starts"):
            ops.next_bases(base, none, none, 1, chunks([0], [0], [0], [True]), FlushRule())
        for rule in (FlushRule(12), FlushRule(256), FlushRule(16, -1), FlushRule(0)):
            with pytest.raises(ValueError, match="power of two that divides 128"):
                ops.next_bases(base, none, none, 1, None, rule)
