"""Run by test_unpack_step.py and test_random_batches.py: kernels against their references.

python check_unpack_step.py cpu|cuda [number of random batches besides the chosen ones]
"""

import sys

import numpy as np
import torch

from megatron_async.device_state import feed_back as feed_back_ops
from megatron_async.device_state import unpack_step as ops
from megatron_async.device_state.bookkeeping_layout import BookkeepingLayout, ring_words
from megatron_async.device_state.device_slots import DeviceSlots
from megatron_async.device_state.step_on_host import feed_back_on_host, unpack_step_on_host
from megatron_async.device_state.unpack_step_reference import unpack_step_reference
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header, pack_record
from megatron_async.ops.step_tensors import StepTensors

where = sys.argv[1]
rng = np.random.default_rng(0)
RING, DUMMY_BLOCK = 3, 9999


class Recorder:
    """Calls a kernel without dependent launch, which Triton's interpreter does not know."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **_: self.kernel[grid](*args, overlap=False)


def poisoned(dims, blocks, tables):
    sizes = dims.rows + 3, dims.tokens + 5, blocks
    whole = StepTensors.empty(*sizes, torch.device(where), dims.sample_rows + 2, tables)
    for field in vars(whole).values():
        field.fill_(-5)
    return whole, whole.head(dims)


def random_slots(count, blocks, block_size, drafts, tables):
    columns = tables * blocks
    slots = DeviceSlots(count, columns, DUMMY_BLOCK, torch.device(where), drafts)
    # Drafts that are often right, and sometimes none.
    slots.drafts.copy_(torch.from_numpy(rng.integers(-1, 3, (count + 1, drafts))))
    slots.last_token.copy_(torch.from_numpy(rng.integers(0, 50000, count + 1)))
    slots.block_table[:-1].copy_(torch.from_numpy(rng.integers(0, 1000, (count, columns))))
    # What earlier owners left.
    slots.records[:-1].copy_(torch.from_numpy(rng.integers(0, 256, (count, RECORD_WORDS))))
    slots.records[:-1, Header.DRAFTS] = torch.from_numpy(rng.integers(0, 5, count)).int().to(where)
    # Some are at their limits, or were launched beyond them.
    limits = rng.integers(2, blocks * block_size + 1, count) if blocks * block_size > 1 else 1
    lengths = np.maximum(limits - rng.integers(-2, 6, count), 1)
    slots.records[:-1, Header.MAX_LENGTH] = torch.tensor(limits, dtype=torch.int32, device=where)
    slots.length[:-1] = torch.tensor(lengths, dtype=torch.int32, device=where)
    return slots


def copy_of(slots, count):
    columns, drafts = slots.block_table.size(1), slots.drafts.size(1)
    copy = DeviceSlots(count, columns, DUMMY_BLOCK, torch.device(where), drafts)
    for name, tensor in vars(slots).items():
        getattr(copy, name).copy_(tensor)
    return copy


def random_record():
    """One of any length, whose words all differ from those of other records."""
    edits = [(int(token), 0.5, 7) for token in rng.integers(0, 999, rng.choice([0, 0, 1, 90]))]
    bad_words = [[int(token)] for token in rng.integers(0, 999, rng.choice([0, 0, 1, 9]))]
    numbers = {word: int(rng.integers(2**20)) for word in Header}
    return pack_record(numbers | {Header.FEATURES: int(rng.integers(256))}, edits, bad_words)


def fill(words, dims, present, count, blocks, block_size, query_lengths, updates, tables):
    """A step's bookkeeping as the host packs it: dummy rows and padding at the ends."""
    layout = BookkeepingLayout.for_batch(dims, updates)
    fields = layout.views(words)
    slots = rng.permutation(count)[: dims.rows]
    slots = np.concatenate((slots, np.full(dims.rows - len(slots), count)))
    slots[present : dims.decode_rows] = count
    lengths = rng.integers(1, blocks * block_size + 1, dims.rows)
    ends = np.cumsum(query_lengths)
    chunks = len(query_lengths)
    if dims.prefill_rows:
        first = dims.decode_rows
        lengths[first : first + chunks] = np.maximum(lengths[first:][:chunks], query_lengths)
        lengths[first + chunks :], slots[first + chunks :] = 1, count
        first_token = present if dims.is_packed else dims.decode_tokens
        fields["prefill_starts"][0] = first_token
        fields["prefill_starts"][1 : chunks + 1] = first_token + ends
        fields["prefill_starts"][chunks + 1 :] = first_token + (ends[-1] if chunks else 0)
        fields["prefill_token_ids"][:] = rng.integers(0, 50000, dims.prefill_tokens)
        fields["prefill_features"][:chunks] = rng.choice([0, 256, 512, 768, 1792], chunks)
        fields["prefill_features"][chunks:] = 0
        fields["prefill_record"][:] = -1
        end = layout.size
        for chunk in np.flatnonzero(rng.random(chunks) < 0.7):
            record = random_record()
            fields["prefill_record"][chunk] = end
            words[end : end + len(record)] = record
            end += len(record)
        fields["prefill_kv_lengths"][:] = lengths[first:]
    fields["row_slots"][:] = slots
    fields["decode_width"][0] = rng.integers(1, dims.width + 1)
    own = np.unique(slots[slots < count])  # updates are for rows of the step
    columns = tables * blocks
    pairs = rng.permutation(len(own) * columns)[:updates]
    fields["num_block_updates"][0] = updates
    fields["block_update_slots"][:] = own[pairs // columns]
    fields["block_update_indices"][:] = pairs % columns
    fields["block_update_blocks"][:] = rng.integers(0, 1000, updates)


def check_kept(kept, truth_kept, truth, keeps):
    """Each token stands at its place, and nothing elsewhere. The tables are random, so several
    tokens may share a place: any of them may stay."""
    kept, truth_kept = kept.flatten().cpu(), truth_kept.flatten().cpu()
    places, tokens = truth.write_index.cpu(), truth.token_ids.cpu().int()
    _, inverse, counts = places.unique(return_inverse=True, return_counts=True)
    alone = counts[inverse] == 1
    if keeps:
        assert torch.equal(truth_kept[places[alone]], tokens[alone])
        for place in places[~alone].unique():
            its = set(tokens[places == place].tolist())
            assert {int(kept[place]), int(truth_kept[place])} <= its
    kept[places[~alone]] = truth_kept[places[~alone]]
    assert torch.equal(kept, truth_kept)
    untouched = torch.ones(len(kept), dtype=torch.bool)
    untouched[places if keeps else places[:0]] = False
    assert (kept[untouched] == -5).all()


def check_on_host(arguments, slots, block_size, told, keeps, tables):
    """What a CPU does, by compiled loops or not, against plain torch, samples included."""
    words, next_entry, dims = arguments
    count, blocks = len(slots.block_table) - 1, slots.block_table.size(1) // tables
    sampled = torch.from_numpy(rng.integers(-1, 3, dims.sample_rows))
    results = []
    for unpack, feed_back in (
        (unpack_step_reference, feed_back_ops.feed_back_reference),
        (unpack_step_on_host, feed_back_on_host),
    ):
        its_slots = copy_of(slots, count)
        whole, step = poisoned(dims, blocks, tables)
        kept = torch.full((DUMMY_BLOCK + 1, block_size), -5, dtype=torch.int32)
        unpack(*arguments, its_slots, block_size, step, told, kept if keeps else None)
        ring = torch.full((RING, dims.rows + 2, ring_words(1 + its_slots.drafts.size(1))), -5).int()
        host, after = ring.clone(), torch.full_like(next_entry, -5)
        feed_back(sampled, step, dims, words, its_slots, ring, host, after)
        results.append((vars(whole), vars(its_slots), ring, host, after, kept, step))
    truth, found = results
    for mine, its in zip(found[:2], truth[:2], strict=True):
        for name in mine:
            assert torch.equal(mine[name], its[name]), (name, dims)
    for mine, its in zip(found[2:5], truth[2:5], strict=True):
        assert torch.equal(mine, its), dims
    check_kept(found[5], truth[5], truth[6], keeps)


if where == "cpu":
    for module in (ops, feed_back_ops):
        for name, kernel in list(vars(module).items()):
            if name.startswith("_") and name.endswith("_kernel"):
                setattr(module, name, Recorder(kernel))
        module.launch_options = lambda tensor: {}


cases = [
    # decode rows, chunks' query lengths, dummy prefill rows, padding tokens, slots, blocks, size
    (1, [], 0, 0, 2, 1, 16),
    (5, [], 0, 0, 9, 7, 4),
    (130, [], 0, 0, 300, 140, 1),
    (0, [3], 0, 0, 1, 3, 4),
    (4, [5, 1, 9], 0, 0, 8, 7, 4),
    (4, [5, 1, 9], 5, 49, 8, 7, 4),
    (0, [], 4, 64, 3, 5, 16),
    (17, [200, 1, 60], 13, 123, 20, 40, 16),
    (3, [1] * 33, 0, 0, 40, 9, 8),
]


def random_case():
    """A batch of any size, captured or not; what it needs of slots is there."""
    decode = int(rng.integers(0, 200))
    chunks = int(rng.integers(0 if decode else 1, 20))
    query_lengths = rng.integers(1, 1 + int(rng.choice([1, 8, 300])), chunks).tolist()
    padded = chunks and rng.random() < 0.5
    dummies = int(rng.integers(0, 17)) if padded else 0
    padding = dummies + int(rng.integers(0, 100)) if dummies else 0
    count = decode + chunks + int(rng.integers(0, 20))
    block_size = int(rng.choice([1, 4, 16, 64]))
    blocks = -(-max(query_lengths, default=1) // block_size) + int(rng.integers(0, 150))
    return decode, query_lengths, dummies, padding, count, blocks, block_size


shares = (0.0, 0.1, 1.0)
packed_runs = 0
runs = [(case, share) for case in cases for share in shares]
for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 0):
    runs.append((random_case(), float(rng.choice(shares))))
for (decode, query_lengths, dummies, padding, count, blocks, block_size), share in runs:
    width = int(rng.choice([1, 1, 2, 4])) if decode else 1
    prefill_tokens = sum(query_lengths) + padding
    packed = bool(width == 1 and query_lengths and rng.random() < 0.7)
    present = int(rng.integers(decode + 1)) if packed or rng.random() < 0.3 else decode
    if packed:  # tokens in all: of rows that are there, of chunks, and padding
        prefill_tokens = max(present + prefill_tokens, decode)
    dims = BatchDimensions(
        decode_rows=decode,
        width=width,
        is_captured=True,
        padded_prefill_rows=len(query_lengths) + dummies,
        padded_prefill_tokens=prefill_tokens,
        is_packed=packed,
    )
    packed_runs += packed and present < decode
    tables = int(rng.choice([1, 1, 2, 3]))
    updates = round(share * min(700, (present + len(query_lengths)) * blocks))
    size = BookkeepingLayout.for_batch(dims, updates).size + len(query_lengths) * RECORD_WORDS
    words = np.full((RING, size + 7), -1, np.int32)
    entry = int(rng.integers(RING))
    query = np.array(query_lengths, dtype=np.int64)
    fill(words[entry], dims, present, count, blocks, block_size, query, updates, tables)
    device_words = torch.from_numpy(words).to(where)
    next_entry = torch.tensor([entry], dtype=torch.int32, device=where)
    slots = random_slots(count, blocks, block_size, width - 1 + int(rng.integers(3)), tables)
    truth_slots = copy_of(slots, count)
    whole, found = poisoned(dims, blocks, tables)
    truth_whole, truth = poisoned(dims, blocks, tables)
    arguments = (device_words, next_entry, dims)
    told = None
    if rng.random() < 0.3:  # as on a later pipeline stage
        told = torch.from_numpy(rng.integers(0, blocks * block_size, decode)).int().to(where)
    kept, truth_kept = (
        torch.full((DUMMY_BLOCK + 1, block_size), -5, dtype=torch.int32, device=where)
        for _ in range(2)
    )
    keeps = rng.random() < 0.8
    unpack_step_reference(
        *arguments, truth_slots, block_size, truth, told, truth_kept if keeps else None
    )
    if where == "cpu":
        check_on_host(arguments, slots, block_size, told, keeps, tables)
    ops.unpack_step_kernels(*arguments, slots, block_size, found, told, kept if keeps else None)
    check_kept(kept, truth_kept, truth, keeps)
    for name in vars(truth_whole):
        assert torch.equal(getattr(whole, name), getattr(truth_whole, name)), (name, dims)
    for name in vars(slots):
        assert torch.equal(getattr(slots, name), getattr(truth_slots, name)), (name, dims)

    # Samples that often agree with the drafts, and -1 where nothing could be sampled.
    sampled = torch.from_numpy(rng.integers(-1, 3, dims.sample_rows)).to(where)
    wide = ring_words(1 + slots.drafts.size(1))
    ring = torch.full((RING, dims.rows + 2, wide), -5, dtype=torch.int32, device=where)
    host = torch.full_like(ring, -5, device="cpu", pin_memory=where != "cpu")
    truth_ring, truth_host, after = ring.clone(), host.clone(), torch.full_like(next_entry, -5)
    truth_after = after.clone()
    truth_host = truth_host.to(where)
    for place, target, its_slots, its_ring, its_host, its_after in (
        (
            feed_back_ops.feed_back_reference,
            truth,
            truth_slots,
            truth_ring,
            truth_host,
            truth_after,
        ),
        (feed_back_ops.feed_back_kernel, found, slots, ring, host, after),
    ):
        place(sampled, target, dims, device_words, its_slots, its_ring, its_host, its_after)
    # Nothing defines what stands after a chunk's one token.
    truth_ring[:, decode:, 3:] = ring[:, decode:, 3:]
    assert torch.equal(ring, truth_ring), dims
    assert torch.equal(host, ring.cpu()), dims
    assert torch.equal(truth_host[:, :decode], truth_ring[:, :decode]), dims
    for name in vars(slots):
        mine, its = getattr(slots, name), getattr(truth_slots, name)
        assert torch.equal(mine[:-1], its[:-1]), (name, dims)
    assert slots.length[-1] == truth_slots.length[-1] == 1
    assert after.tolist() == truth_after.tolist() == [(entry + 1) % RING]
assert packed_runs, "no batch was packed with dummy decode rows"
