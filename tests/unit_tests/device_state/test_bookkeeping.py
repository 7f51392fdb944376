"""The packed buffer: host and device read the same fields, padding hurts nobody."""

import itertools

import numpy as np
import pytest
import torch

from megatron_async import DynamicInferenceRequest, InferenceConfig, SamplingParams
from megatron_async.device_state.bookkeeping_layout import FIELDS, BookkeepingLayout
from megatron_async.devices import CpuDevice
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.slot_records import HEADER, Header, RowFeature
from megatron_async.planning.graph_shapes import (
    GraphShapes,
    graph_sizes,
    make_graph_shapes,
    mixed_graph_sizes,
    packed_graph_sizes,
)
from megatron_async.planning.host_staging import HostStaging
from megatron_async.planning.plan_builder import PlanBuilder, PrefillChunk
from megatron_async.planning.request_slots import NO_DECODE, DecodeRows, RequestSlots
from tests.support.ready_requests import made_ready

DUMMY_SLOT = 4
SEED = 1 << 40 | 0x8000_0001


def decode_rows(slots, chosen):
    """Rows of one query token."""
    rows = np.array(chosen)
    return DecodeRows(rows, 1, slots.places(rows, 1))


@pytest.fixture
def slots():
    slots = RequestSlots(capacity=4, max_sequence_length=32, max_blocks=8)
    for i in range(3):
        request = DynamicInferenceRequest(
            request_id=i,
            prompt_tokens=np.arange(10 * i, 10 * i + 6, dtype=np.int32),
            sampling_params=SamplingParams(temperature=0.5, top_k=i + 2, top_p=0.9, min_p=0.1),
        )
        slots.acquire(made_ready(request, 20, SEED + i), rank=i, max_length=20)
    return slots


@pytest.fixture
def staging():
    device = CpuDevice()
    yield HostStaging(device, 4096, 2, DUMMY_SLOT)
    device.close()


def test_fields_do_not_overlap_and_fit():
    dims = BatchDimensions(decode_rows=5, prefill_lengths=((3, 3), (4, 9)))
    layout = BookkeepingLayout.for_batch(dims, 7)
    spans = sorted(layout.spans.values())
    assert len(spans) == len(FIELDS)
    assert spans[0][0] == 0
    assert spans[-1][1] == layout.size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert layout.size <= BookkeepingLayout.capacity(7, 12, 7)


def test_host_and_device_views_are_the_same_words_of_a_buffer():
    dims = BatchDimensions(decode_rows=2, prefill_lengths=((3, 3),))
    layout = BookkeepingLayout.for_batch(dims, 4)
    words = torch.zeros(layout.size, dtype=torch.int32)
    host, device = layout.views(words.numpy()), layout.views(words)
    for i, name in enumerate(host):
        host[name][:] = i + 1
    for i, name in enumerate(device):
        assert device[name].tolist() == [i + 1] * len(host[name]), name
    assert (words != 0).all(), "no word belongs to nobody"


@pytest.mark.parametrize("seed", range(20))
def test_no_step_exceeds_the_capacity(seed):
    """Any split of the limits: rows of at least one token each, every block handed out at once."""
    rng = np.random.default_rng(seed)
    max_requests, num_blocks = int(rng.integers(1, 9)), int(rng.integers(1, 30))
    max_tokens = max_requests + int(rng.integers(0, 20))
    prefill_rows = int(rng.integers(1, max_requests + 1))
    capacity = BookkeepingLayout.capacity(max_requests + prefill_rows, max_tokens, num_blocks)
    for _ in range(50):
        rows = int(rng.integers(1, max_requests + 1))
        decode = int(rng.integers(0, rows + 1))
        lengths = np.ones(rows - decode, np.int64)
        if len(lengths):
            lengths[0] += max_tokens - rows
        dims = BatchDimensions(
            decode_rows=decode, prefill_lengths=tuple((int(n), int(n)) for n in lengths)
        )
        updates = int(rng.integers(0, num_blocks + 1))
        assert BookkeepingLayout.for_batch(dims, updates).size <= capacity
    mixed = mixed_graph_sizes(max_requests, max_tokens)
    shapes = GraphShapes(graph_sizes(max_requests, None), mixed, prefill_rows)
    for dims in shapes.all_shapes():
        assert BookkeepingLayout.for_batch(dims, num_blocks).size <= capacity


def test_device_reads_what_the_host_wrote(slots, staging):
    builder = PlanBuilder(slots)
    builder.build(NO_DECODE, [PrefillChunk(0, 0, 6), PrefillChunk(2, 0, 2)])
    builder.add_block_updates(*(np.array([v], np.int32) for v in (0, 1, 5)))
    chunks = [PrefillChunk(1, 0, 6), PrefillChunk(2, 2, 5)]
    plan = builder.build(decode_rows(slots, [0]), chunks)
    words = staging.pack(plan, slots)
    fields = BookkeepingLayout.for_batch(plan.dims, 1).views(words)
    assert fields["row_slots"].tolist() == [0, 1, 2]
    assert fields["prefill_kv_lengths"].tolist() == [6, 5]
    assert fields["block_update_blocks"].tolist() == [5]
    assert fields["prefill_token_ids"].tolist() == [10, 11, 12, 13, 14, 15, 22, 23, 24]
    assert fields["num_block_updates"].tolist() == [1]
    assert fields["prefill_starts"].tolist() == [1, 7, 10]
    size = BookkeepingLayout.for_batch(plan.dims, 1).size
    assert plan.produces.tolist() == [True, True, False]
    # Slot 2 goes on with a prompt: the device has its record.
    assert fields["prefill_record"].tolist() == [size, -1]
    assert len(words) == size + HEADER
    record = words[size:]
    assert record[Header.TOP_K] == 3
    assert record[Header.TOP_P : Header.TOP_P + 1].view(torch.float32).item() == np.float32(0.9)
    assert record[Header.SEED_LOW :][:2].clone().view(torch.int64).item() == SEED + 1
    assert record[Header.MAX_LENGTH] == 20


def test_words_that_the_device_has_are_not_copied(slots, staging):
    builder = PlanBuilder(slots)
    builder.build(NO_DECODE, [PrefillChunk(0, 0, 6), PrefillChunk(2, 0, 2)])

    def is_copied(decode, prefill=()):
        return (
            staging.pack(builder.build(decode_rows(slots, decode), list(prefill)), slots)
            is not None
        )

    assert is_copied([0])
    assert is_copied([0])  # the ring's other entry
    assert not is_copied([0])
    builder.add_block_updates(*(np.array([v], np.int32) for v in (0, 1, 5)))
    assert is_copied([0])  # a new block
    assert not is_copied([0])
    assert is_copied([0])  # without it
    assert is_copied([0], [PrefillChunk(1, 0, 6)])
    assert not is_copied([0])
    assert is_copied([0])  # the step with prefill wrote over it
    assert is_copied([0, 1])
    assert not is_copied([0])
    assert not is_copied([0, 1])
    assert not is_copied([0])
    staging.forget(builder.next_step)
    assert is_copied([0, 1])


def test_padded_rows_point_at_the_dummy_slot(slots, staging):
    builder = PlanBuilder(slots, GraphShapes((1, 2, 4)))
    builder.build(NO_DECODE, [PrefillChunk(i, 0, 6) for i in range(3)])
    builder.add_block_updates(*(np.array([v], np.int32) for v in (2, 1, 7)))
    plan = builder.build(decode_rows(slots, [0, 1, 2]), [])
    assert plan.dims.is_captured
    assert plan.dims.decode_rows == 4
    assert plan.num_rows == 3
    layout = BookkeepingLayout.for_batch(plan.dims, 1)
    fields = layout.views(staging.pack(plan, slots))
    assert fields["row_slots"].tolist() == [0, 1, 2, DUMMY_SLOT]
    assert fields["decode_width"].tolist() == [1]
    assert fields["num_block_updates"].tolist() == [1]
    assert fields["block_update_slots"].tolist() == [2]
    assert fields["block_update_indices"].tolist() == [1]
    assert fields["block_update_blocks"].tolist() == [7]
    assert plan.rows_of(np.array([5, 6, 7, 99])).tolist() == [5, 6, 7]


def test_a_mixed_step_is_padded_twice(slots, staging):
    builder = PlanBuilder(slots, GraphShapes((4,), {8: (0, 2), 16: (0, 2, 4)}, prefill_rows=3))
    builder.build(NO_DECODE, [PrefillChunk(0, 0, 6), PrefillChunk(2, 0, 2)])
    chunks = [PrefillChunk(1, 0, 6), PrefillChunk(2, 2, 5)]
    plan = builder.build(decode_rows(slots, [0]), chunks)
    assert (plan.dims.decode_rows, plan.dims.prefill_rows, plan.dims.prefill_tokens) == (2, 3, 16)
    layout = BookkeepingLayout.for_batch(plan.dims, 0)
    fields = layout.views(staging.pack(plan, slots))
    assert fields["row_slots"].tolist() == [0, DUMMY_SLOT, 1, 2, DUMMY_SLOT]
    assert fields["prefill_kv_lengths"].tolist() == [6, 5, 1]
    assert fields["prefill_starts"].tolist() == [2, 8, 11, 11]
    expected = [10, 11, 12, 13, 14, 15, 22, 23, 24]
    assert fields["prefill_token_ids"].tolist() == expected + [0] * 7
    assert fields["prefill_record"].tolist() == [layout.size, -1, -1]
    assert fields["prefill_features"].tolist() == [RowFeature.PRODUCES | RowFeature.STARTS, 0, 0]
    assert plan.rows_of(np.array([5, 99, 6, 7, 99])).tolist() == [5, 6, 7]


def test_a_packed_step_is_padded_in_all_its_tokens(slots, staging):
    shapes = GraphShapes((4,), {8: (0, 2), 10: (0, 2, 4)}, is_packed=True, prefill_rows=3)
    builder = PlanBuilder(slots, shapes)
    builder.build(NO_DECODE, [PrefillChunk(0, 0, 6), PrefillChunk(2, 0, 2)])
    chunks = [PrefillChunk(1, 0, 6), PrefillChunk(2, 2, 5)]
    plan = builder.build(decode_rows(slots, [0]), chunks)
    dims = plan.dims
    assert (dims.decode_rows, dims.prefill_rows, dims.tokens) == (2, 3, 10)
    assert plan.work_tokens == (9, 1)
    fields = BookkeepingLayout.for_batch(dims, 0).views(staging.pack(plan, slots))
    assert fields["row_slots"].tolist() == [0, DUMMY_SLOT, 1, 2, DUMMY_SLOT]
    assert fields["prefill_starts"].tolist() == [1, 7, 10, 10], "behind the row that is there"
    assert fields["prefill_token_ids"].tolist() == [10, 11, 12, 13, 14, 15, 22, 23, 24, 0]
    # Rows of logits have dummy rows between them.
    assert plan.sample_rows(np.array([0, 1, 2])).tolist() == [0, 2, 3]
    assert not shapes.shape(4).is_packed, "decode rows alone"


@pytest.mark.parametrize(("requests", "tokens"), [(256, 2048), (1024, 8192), (3, 8), (100, 700)])
def test_packed_shapes_hold_every_step_and_pad_little(requests, tokens):
    sizes = packed_graph_sizes(requests, tokens)
    shapes = GraphShapes((requests,), sizes, True, prefill_rows=16, most_prefill_rows=16)
    assert list(sizes)[-1] == tokens
    for decode in {0, 1, 63 % requests, 65 % requests, requests - 1}:
        for prefill in {1, 30, 250, 600, tokens - decode}:
            total = decode + prefill
            if not 0 < prefill <= tokens - decode:
                continue
            dims = shapes.find(decode, 1, prefill)
            assert dims is not None
            assert dims.is_packed
            assert dims.decode_rows >= decode
            assert dims.tokens >= max(total, dims.decode_rows)
            assert dims.tokens <= max(total + 31, total * 9 // 8, 64)


def test_few_decode_rows_and_prompts_have_64_rows_of_logits():
    """64 rows of the vocabulary's product take the least for a row."""
    config = InferenceConfig(max_requests=256, max_tokens=2048)
    shapes = make_graph_shapes(config, captures_graphs=True, captures_prefill=True)
    for tokens in (100, 256, 480):
        assert shapes.find(30, 1, tokens).sample_rows == 64


def test_a_mixed_step_that_fits_no_shape_runs_eagerly(slots):
    builder = PlanBuilder(slots, GraphShapes((4,), {8: (0,)}, prefill_rows=1))
    first = builder.build(NO_DECODE, [PrefillChunk(0, 0, 6)])
    second = builder.build(decode_rows(slots, [0]), [PrefillChunk(1, 0, 6)])
    assert first.dims.is_captured
    assert not second.dims.is_captured
    assert second.dims.prefill_lengths == ((6, 6),)


def test_many_short_prompts_of_a_step_find_a_graph():
    """A shape of enough prefill tokens to have as many prefill rows."""
    sizes = mixed_graph_sizes(256, 2048)
    shapes = GraphShapes((256,), sizes, prefill_rows=16, most_prefill_rows=64)

    def found(prefill_rows, prefill_tokens):
        dims = shapes.find(0, prefill_rows, prefill_tokens)
        return None if dims is None else (dims.prefill_rows, dims.prefill_tokens)

    assert found(1, 10) == (16, 64)
    assert found(16, 600) == (20, 640)
    assert found(17, 100) == (18, 576)
    assert found(40, 1300) == (44, 1408)
    assert found(64, 300) == (64, 2048)
    assert found(65, 2048) is None
    shapes.keep_mixed_up_to(1024)
    assert found(32, 64) == (32, 1024)
    assert found(33, 64) is None


@pytest.mark.parametrize(
    ("requests", "tokens", "count", "least", "most"),
    [
        (256, 2048, 16, 16, 64),
        (256, 256, 16, 16, 16),
        (8, 2048, 16, 8, 8),
        (512, 8192, 300, 300, 300),
    ],
)
def test_prefill_rows_of_graphs(requests, tokens, count, least, most):
    config = InferenceConfig(
        max_requests=requests, max_tokens=tokens, cuda_graph_mixed_prefill_count=count
    )
    shapes = make_graph_shapes(config, captures_graphs=True, captures_prefill=True)
    assert shapes.rows_beside(1) == config.mixed_prefill_rows == least
    assert shapes.rows_beside(tokens) == config.most_mixed_prefill_rows == most
    assert config.max_rows == requests + most
    assert max(dims.rows for dims in shapes.all_shapes()) <= config.max_rows


@pytest.mark.parametrize(("requests", "tokens"), [(1, 1), (1, 64), (7, 100), (256, 2048)])
def test_mixed_shapes_pad_at_most_a_third_and_serve_every_step(requests, tokens):
    sizes = mixed_graph_sizes(requests, tokens)
    shapes = GraphShapes((requests,), sizes, prefill_rows=requests)
    for prefill_tokens in range(1, tokens + 1, max(tokens // 200, 1)):
        for decode in {0, 1, requests // 2, requests}:
            dims = shapes.find(decode, 1, prefill_tokens)
            assert dims is not None
            assert dims.decode_rows >= decode
            assert dims.prefill_tokens >= prefill_tokens
            assert dims.prefill_tokens <= max(prefill_tokens * 1.5, min(64, tokens))
            rest = dims.decode_rows - decode
            assert rest <= max(dims.prefill_tokens, -(-requests // 4))


@pytest.mark.parametrize(
    ("most", "count", "expected"),
    [
        (1, None, (1,)),
        (20, None, (1, 2, 4, 8, 16, 20)),
        (256, 0, ()),
        (256, 4, (64, 128, 192, 256)),
        (3, 8, (1, 2, 3)),
    ],
)
def test_graph_sizes(most, count, expected):
    assert graph_sizes(most, count) == expected


def test_default_graph_sizes_pad_little():
    sizes = graph_sizes(1000, None)
    assert sizes[-1] == 1000
    for rows in range(1, 1001):
        padded = next(size for size in sizes if size >= rows)
        assert padded <= max(rows * 1.15, rows + 7)
