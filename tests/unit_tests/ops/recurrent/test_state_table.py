"""Rows of the state pools by step: the kernel and the reference."""

import numpy as np
import pytest
import torch

from megatron_async.device_state.bookkeeping_layout import BookkeepingLayout
from megatron_async.device_state.state_table import (
    StatePlan,
    StateTable,
    StepStates,
    pack_states,
    unpack_states,
    unpack_states_reference,
    words_of_states,
)
from megatron_async.ops.batch_dimensions import BatchDimensions

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DUMMY_SLOT, DUMMY_ROW = 300, 400


def padded(decode_rows, prefill_rows, prefill_tokens):
    return BatchDimensions(
        decode_rows,
        is_captured=True,
        padded_prefill_rows=prefill_rows,
        padded_prefill_tokens=prefill_tokens,
    )


def plan(saves, writes, reads, dests):
    slots, rows = zip(*saves) if saves else ((), ())
    return StatePlan(*(np.array(part, np.int32) for part in (writes, reads, dests, slots, rows)))


def run(take, dims, row_slots, table, states, device="cpu"):
    """What a step finds, and the table behind it; its words are entry 1 of 2."""
    layout = BookkeepingLayout.for_batch(dims, 2)
    words = np.full((2, layout.size + words_of_states(300, 4096)), 77, np.int32)
    words[1, layout.start("states")] = 0
    if states is not None:
        words[1, layout.start("states")] = layout.size
        end = pack_states(words[1], layout.size, states)
        assert end <= layout.size + words_of_states(dims.rows, dims.prefill_tokens)
    table = torch.tensor(table, dtype=torch.int32, device=device)
    sizes = dims.rows, dims.prefill_rows, dims.decode_rows
    sizes += (dims.prefill_tokens // 128 + 2 * dims.prefill_rows,)
    out = StepStates(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))
    take(
        torch.tensor(words, device=device),
        torch.tensor([1], dtype=torch.int32, device=device),
        dims,
        torch.tensor(row_slots, device=device),
        table,
        DUMMY_ROW,
        out,
    )
    found = (out.rows, out.read_rows, out.saves, out.chunk_dest, table)
    return [tensor.tolist() for tensor in found]


def check_a_step(take, device="cpu"):
    """Three decode rows, one of them a dummy; two chunks and a dummy one."""
    dims = padded(3, 3, 300)
    table = [10, 11, 12, 13, 14, DUMMY_ROW]
    states = plan([(3, 20)], [21, 22], [21, 30], [-1, 31, -1])
    row_slots = [3, 0, 5, 4, 1, 5]
    rows, reads, saves, dests, after = run(take, dims, row_slots, table, states, device)
    assert rows == [13, 10, DUMMY_ROW, 21, 22, DUMMY_ROW]
    assert reads == [21, 30, DUMMY_ROW]
    assert saves == [20, -1, -1]
    assert dests == [-1, 31, -1] + [-1] * 5
    assert after == [10, 22, 12, 13, 21, DUMMY_ROW]


def check_a_step_with_nothing_new(take, device="cpu"):
    dims = padded(2, 1, 16)
    table = [7, 8, DUMMY_ROW]
    found = run(take, dims, [1, 2, 2], table, None, device)
    assert found == [[8, DUMMY_ROW, DUMMY_ROW], [DUMMY_ROW], [-1, -1], [-1, -1], table]


def test_reference():
    check_a_step(unpack_states_reference)
    check_a_step_with_nothing_new(unpack_states_reference)


def test_kernel(device):
    check_a_step(unpack_states, device)
    check_a_step_with_nothing_new(unpack_states, device)


@pytest.mark.parametrize("decode_rows", [0, 5, 200])
@pytest.mark.parametrize("chunks", [0, 1, 9])
def test_random_steps(decode_rows, chunks, device):
    """More saves than a tile, more scan chunks than a tile."""
    if not decode_rows + chunks:
        pytest.skip("a step has rows")
    random = np.random.default_rng(decode_rows + chunks)
    slots = random.permutation(DUMMY_SLOT)
    own = slots[: decode_rows + chunks].tolist()
    row_slots = (
        own[:decode_rows] + [DUMMY_SLOT] * 3 + own[decode_rows:] + [DUMMY_SLOT] * bool(chunks)
    )
    dims = padded(decode_rows + 3, chunks + bool(chunks), 2000 * chunks)
    table = [*random.permutation(DUMMY_SLOT).tolist(), DUMMY_ROW]
    rows = random.permutation(DUMMY_ROW).tolist()
    saved = own[: decode_rows * 4 // 5]
    states = plan(
        list(zip(saved, rows)), rows[:chunks], rows[5 : 5 + chunks],
        random.integers(-1, 9, 17 * chunks),
    )  # fmt: skip
    expected = run(unpack_states_reference, dims, row_slots, table, states)
    assert run(unpack_states, dims, row_slots, table, states, device) == expected


def test_a_step_takes_views_of_the_largest():
    table = StateTable(4, 9, max_rows=6, max_tokens=256, device=torch.device("cpu"))
    dims = BatchDimensions(decode_rows=2)
    words = torch.zeros(1, BookkeepingLayout.for_batch(dims, 0).size, dtype=torch.int32)
    entry = torch.zeros(1, dtype=torch.int32)
    first = table.unpack(words, entry, dims, torch.tensor([1, 4]))
    again = table.unpack(words, entry, dims, torch.tensor([2, 4]))
    assert first.rows.data_ptr() == again.rows.data_ptr()
    assert again.rows.tolist() == [9, 9]  # nobody has a row yet
