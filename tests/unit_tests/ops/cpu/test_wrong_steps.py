"""Wrong bookkeeping on a CPU: a step that fails, and no byte written outside of its arrays."""

import numpy as np
import pytest
import torch

from megatron_async.device_state.bookkeeping_layout import UPDATE_FIELDS, BookkeepingLayout
from megatron_async.device_state.device_slots import DeviceSlots
from megatron_async.device_state.step_on_host import feed_back_on_host, unpack_step_on_host
from megatron_async.ops.attention.cpu.host_attention import HostPagedAttention
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.cpu.compiler import compiles
from megatron_async.ops.sampling.slot_records import Header
from megatron_async.ops.step_tensors import StepTensors

CPU = torch.device("cpu")
SLOTS, COLUMNS, BLOCKS, BLOCK_SIZE, MARGIN, POISON = 6, 4, 9, 4, 64, -77
WRONG = (-(2**31), -1, 7, 40, 2**20, 2**31 - 1)


def surrounded(tensor: torch.Tensor, around: list[torch.Tensor]) -> torch.Tensor:
    """A copy with a margin on both sides, which nobody may write to."""
    whole = torch.full((tensor.numel() + 2 * MARGIN,), POISON, dtype=tensor.dtype)
    around += [whole[:MARGIN], whole[MARGIN + tensor.numel() :]]
    copy = whole[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)
    return copy.copy_(tensor)


def step_of(width: int) -> tuple[BatchDimensions, torch.Tensor]:
    """A step of three decode rows, with two updates of block tables."""
    dims = BatchDimensions(decode_rows=3, width=width)
    words = np.zeros(BookkeepingLayout.for_batch(dims, 2).size, np.int32)
    fields = BookkeepingLayout.for_batch(dims, 2).views(words)
    fields["num_block_updates"][0], fields["decode_width"][0] = 2, width
    fields["row_slots"][:] = 4, 0, 2
    for name, values in zip(UPDATE_FIELDS, ((4, 0), (0, 1), (3, 8)), strict=True):
        fields[name][:] = values
    return dims, torch.from_numpy(words)[None]


def slots_of(around: list[torch.Tensor], width: int) -> DeviceSlots:
    slots = DeviceSlots(SLOTS, COLUMNS, BLOCKS, CPU, width - 1)
    slots.records[:-1, Header.MAX_LENGTH] = COLUMNS * BLOCK_SIZE
    slots.records[:-1, Header.DRAFTS] = width - 1
    slots.length[:] = 5
    for name, tensor in vars(slots).items():
        setattr(slots, name, surrounded(tensor, around))
    return slots


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("part", ["words", "slots"])
def test_random_words_end_in_an_error_or_in_places_that_exist(width: int, part: str) -> None:
    rng, failed, passed = np.random.default_rng(width), 0, 0
    dims, words = step_of(width)
    for _ in range(400):
        around: list[torch.Tensor] = []
        slots = slots_of(around, width)
        given = surrounded(words, around)
        ring, host = (
            surrounded(torch.zeros(1, 3, 2 * width + 1, dtype=torch.int32), around) for _ in "rh"
        )
        if part == "words":
            given[0, int(rng.integers(given.size(1)))] = int(rng.choice(WRONG))
        else:  # filled by checked words alone, the block tables excepted
            slot = int(rng.choice([0, 2, 4]))
            slots.length[slot] = int(rng.choice(WRONG))
            word = rng.choice([Header.MAX_LENGTH, Header.DRAFTS])
            slots.records[slot, int(word)] = int(rng.choice(WRONG))
        step = StepTensors.empty(dims.rows, dims.tokens, COLUMNS, CPU, dims.sample_rows)
        for name, tensor in vars(step).items():
            setattr(step, name, surrounded(tensor, around))
        next_entry = torch.zeros(1, dtype=torch.int32)
        backend = HostPagedAttention if compiles() else TorchPagedAttention
        try:
            unpack_step_on_host(given, next_entry, dims, slots, BLOCK_SIZE, step)
            backend(BLOCK_SIZE, COLUMNS, CPU).begin_step(
                dims, step.block_tables, step.kv_lengths, positions=step.positions
            )
            sampled = torch.arange(dims.sample_rows)
            feed_back_on_host(sampled, step, dims, given, slots, ring, host, next_entry)
        except (IndexError, RuntimeError):
            failed += 1
        else:
            passed += 1
            assert int(step.write_index.min()) >= 0
            assert int(step.write_index.max()) < (BLOCKS + 1) * BLOCK_SIZE
            assert int(step.block_tables.max()) <= BLOCKS
        assert all((margin == POISON).all() for margin in around)
    assert min(failed, passed) > 10, (failed, passed)


def test_a_block_outside_of_the_cache_fails_its_step() -> None:
    dims, words = step_of(1)
    place = BookkeepingLayout.for_batch(dims, 2).start(UPDATE_FIELDS[2])
    for wrong in (-1, BLOCKS + 1):
        words[0, place] = wrong
        step = StepTensors.empty(dims.rows, dims.tokens, COLUMNS, CPU, dims.sample_rows)
        with pytest.raises(IndexError, match="a block that the KV cache does not have"):
            unpack_step_on_host(
                words, torch.zeros(1, dtype=torch.int32), dims, slots_of([], 1), BLOCK_SIZE, step
            )
