"""The paged decode kernel against a gathered softmax in float64."""

import random
from copy import copy
from functools import partial

import pytest
import torch

from megatron_async.ops.attention import decode_schedule
from megatron_async.ops.attention.decode_attention import DecodeWorkspace, paged_decode_attention
from megatron_async.ops.attention.join_parts import JOIN_CHUNK
from megatron_async.ops.linear.quantised_weight import quantise_rows
from megatron_async.ops.linear.rounded_rows import new_rounded
from tests.unit_tests.ops.attention import decode_batch
from tests.unit_tests.ops.attention.decode_batch import Batch, processors
from tests.unit_tests.ops.attention.schedule_reference import decode_schedule_reference
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT

SHAPES = [(3, 3, 64), (8, 4, 128), (2, 8, 64), (1, 1, 128), (4, 7, 80), (2, 5, 112)]
"""(KV heads, query heads of each, dimension)."""
PART = 64
"""Tokens of parts that do not depend on the batch."""
GPU_CASES = [
    (dtype, shape, (16, 64, 256)[(i + j) % 3])
    for i, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32))
    for j, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(
    ("lengths", "block_size", "kv_heads", "group", "dim", "dtype"),
    [
        ([1, 15, 16, 17], 16, 1, 1, 16, torch.float32),
        ([0, 63, 64, 65, 0, 200], 64, 3, 3, 64, torch.float32),
        ([255, 256, 257], 256, 2, 4, 128, torch.float32),
        ([300, 48, 97], 48, 2, 8, 32, torch.float32),
        ([70, 1], 16, 1, 20, 64, torch.float32),  # more heads than the smallest tile
        ([100, 33], 64, 1, 4, 256, torch.float32),  # shorter tiles
        ([0, 129, 64], 16, 3, 3, 64, torch.float16),
        ([130, 1], 64, 2, 3, 80, torch.float32),  # no power of two
        ([70, 33], 16, 1, 2, 96, torch.float32),
        ([65], 64, 1, 4, 192, torch.float32),
    ],
)
@pytest.mark.parametrize("count", [1, 6, 132])
def test_against_softmax(lengths, block_size, kv_heads, group, dim, dtype, count, device):
    batch = Batch(
        max(lengths), len(lengths), block_size, kv_heads, group, dim, dtype, device, count
    )
    expected = batch.refill(lengths)
    batch.run(is_settled=count == 6)
    batch.check(expected)


@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize(
    ("lengths", "block_size", "kv_heads", "group", "dim"),
    [
        ([5, 15, 16, 17], 16, 1, 1, 16),
        ([65, 63, 64, 200, 1, 129], 64, 3, 3, 64),  # parts that hold drafts alone
        ([300, 48, 98], 48, 2, 8, 32),
        ([70, 33], 16, 1, 3, 96),
    ],
)
@pytest.mark.parametrize("count", [1, 6, 132])
def test_several_query_tokens_a_row(
    lengths, block_size, kv_heads, group, dim, count, width, device
):
    """Each query token sees the keys up to its own position, and no draft behind it."""
    batch = Batch(
        max(lengths), len(lengths), block_size, kv_heads, group, dim, torch.float32, device, count,
        width=width,
    )  # fmt: skip
    expected = batch.refill(lengths)
    batch.run(is_settled=count == 6)
    batch.check(expected)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
def test_many_parts(is_settled, width, is_full, device, monkeypatch):
    """Maxima grow and shrink from chunk to chunk; of the last one some query tokens see nothing.
    Joined by the last program, or by the second kernel, which takes several chunks of parts."""
    if is_full:
        monkeypatch.setattr(decode_schedule, "FULL", 0)
    lengths = [64 * JOIN_CHUNK + width - 1, 70, 64 * (2 * JOIN_CHUNK + 3)]
    batch = Batch(max(lengths), 3, 64, 1, 2, 32, torch.float32, device, width=width)
    expected = batch.refill(lengths, query_scale=10.0)
    _items, splits = decode_schedule_reference(lengths, batch.workspace.schedule.extra, 64)
    assert [parts for _slot, parts in splits] == [
        JOIN_CHUNK + (width > 1), 2, 2 * JOIN_CHUNK + 3
    ]  # fmt: skip
    batch.run(is_settled)
    batch.check(expected)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("count", [1, 6, 132])
def test_keys_that_are_not_there(count, width, device):
    """The first place of a sequence has no key, as of a draft model; one query stands there."""
    lengths = [5, 1, 2, 65, 200, 129]
    batch = Batch(200, len(lengths), 64, 2, 3, 64, torch.float32, device, count,
                  width=width, first_key=1)  # fmt: skip
    expected = batch.refill(lengths)
    batch.run()
    batch.check(expected)


def test_whole_rows_do_not_depend_on_others(device):
    """A row of one part takes the same path whatever other rows need: bit for bit."""
    batch = Batch(200, 2, 16, 2, 3, 64, torch.float32, device, count=1)
    batch.refill([64, 200])
    batch.run()
    alone = batch.out.clone()
    with processors(132):
        batch.workspace = DecodeWorkspace(2, 6, 2, 64, device)
    batch.run()
    assert torch.equal(batch.out[0], alone[0])
    assert not torch.equal(batch.out[1], alone[1])  # joined from parts: other roundings


def row_alone(batch, row, count, width=1):
    """The bits of a row whose last `width` tokens are the queries, on another device."""
    alone = copy(batch)
    tokens = slice((row + 1) * batch.width - width, (row + 1) * batch.width)
    alone.width, alone.tables = width, batch.tables[row : row + 1]
    alone.lengths = batch.lengths[row : row + 1].clone()
    alone.query, alone.positions = batch.query[tokens].clone(), batch.positions[tokens].clone()
    alone.out = torch.full_like(alone.query, float("nan"))
    heads, longest = batch.kv_heads * batch.group, batch.block_size * batch.tables.size(1)
    with processors(count):
        alone.workspace = DecodeWorkspace(
            1, heads, batch.kv_heads, batch.dim, batch.device, width, PART, longest, batch.window
        )
    alone.run()
    return alone.out


@pytest.mark.parametrize(("width", "window"), [(1, 0), (3, 0), (3, 300)])
def test_parts_of_their_own_length(width, window, device, matrix_units):
    """A row has the same bits in any company, on any device and in any width: as a whole, or its
    parts among several programs."""
    lengths, dtype = [3, 64, 65, 350, 32, 620, 127], torch.float16
    runs = []
    for count in (1, 6, 40):
        batch = Batch(620, len(lengths), 64, 1, 3, 160, dtype, device, count,
                      width=width, part=PART, window=window, has_sinks=window > 0)  # fmt: skip
        expected = batch.refill(lengths, query_scale=3.0)
        batch.run()
        batch.check(expected)
        assert not batch.workspace.arrived.any()
        runs.append(batch)
    splits = [batch.workspace.schedule.splits[:, 0].max() for batch in runs]
    assert splits[0] == -1 < splits[1] < splits[2], "whole rows, some rows and more rows in parts"
    assert all(torch.equal(batch.out, runs[0].out) for batch in runs)
    for row, count in ((2, 6), (3, 1), (3, 6), (5, 40)):
        found = row_alone(batch, row, count)
        assert torch.equal(found[0], batch.out[(row + 1) * width - 1])


@pytest.mark.parametrize("is_full", [False, True])
def test_workspace_serves_layers_in_turn(is_full, device, monkeypatch):
    """What a call leaves in the workspace is nothing to the next one."""
    if is_full:
        monkeypatch.setattr(decode_schedule, "FULL", 0)
    batch = Batch(300, 3, 64, 1, 4, 32, torch.float32, device, count=4)
    for lengths in ([300, 257, 5], [64, 300, 0], [129, 65, 200]):
        expected = batch.refill(lengths)
        for _layer in range(2):
            batch.run()
            batch.check(expected)
            batch.out.fill_(float("nan"))
            batch.attend()
            batch.check(expected)


@pytest.mark.parametrize(
    ("count", "width", "part", "is_full", "scale"),
    [
        (1, 2, 0, False, None),  # whole rows
        (40, 3, 0, False, 0.003),  # a second kernel joins
        (40, 1, 0, True, None),  # the last program joins
        (40, 1, PART, False, None),
    ],
)
def test_rows_for_a_product_in_fp8(count, width, part, is_full, scale, device, monkeypatch):
    """Rows that a kernel of their own would round, from the query's dtype."""
    if is_full:
        monkeypatch.setattr(decode_schedule, "FULL", 0)
    batch = Batch(300, 3, 64, 2, 2, 128, EXACT_16_BIT[-1], device, count, width=width, part=part)
    batch.refill([300, 5, 129])
    batch.run()
    plain = batch.out.flatten(1)
    scale = None if scale is None else torch.tensor(scale, device=device)
    rounded = new_rounded(3 * width, 4 * 128, torch.device(device), 4, scale)
    batch.out = rounded.codes[: 3 * width].view(batch.out.shape)
    attend = partial(paged_decode_attention, rounded=rounded)
    monkeypatch.setattr(decode_batch, "paged_decode_attention", attend)
    batch.run()
    codes, scales = quantise_rows(plain, scale)
    assert torch.equal(rounded.codes[: 3 * width].float(), codes.float())
    assert torch.equal(rounded.scales[:, : 3 * width].T, scales)
    batch.out = torch.empty_like(batch.out)
    with pytest.raises(ValueError, match="into `rounded`; found 128"):
        batch.attend()


def test_scores_far_from_zero(device):
    """Scores of some hundreds, whose exponentials overflow: only differences may be taken."""
    batch = Batch(150, 2, 16, 1, 2, 32, torch.float16, device)
    expected = batch.refill([150, 40], query_scale=100.0)
    batch.run()
    batch.check(expected)


class TestBadInput:
    """A clear error on the host, before any kernel."""

    @pytest.fixture
    def batch(self, device):
        batch = Batch(100, 2, 16, 2, 2, 32, torch.float32, device)
        batch.refill([100, 7])
        batch.workspace.schedule.update(batch.lengths)
        return batch

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("values", lambda t: t[:-1], "does not fit caches"),
            ("keys", lambda t: t[..., :16], "does not fit caches"),
            ("query", lambda t: t[:1], "block tables"),
            ("query", lambda t: torch.cat((t, t)), "an output of this shape"),
            ("tables", lambda t: t[:1], "block tables"),
            ("tables", lambda t: t.long(), "int32"),
            ("out", lambda t: t.half(), "one dtype"),
            ("out", lambda t: t[:, :3], "an output of this shape"),
            ("query", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
        ],
    )
    def test_tensors(self, batch, name, change, message):
        setattr(batch, name, change(getattr(batch, name)))
        with pytest.raises(ValueError, match=message):
            batch.attend()

    def test_schedule_of_other_rows(self, batch):
        batch.workspace.schedule.update(batch.lengths[:1])
        with pytest.raises(ValueError, match=r"a schedule of 2 rows; found .* and 1"):
            batch.attend()

    def test_workspace_of_another_model(self, batch, device):
        with processors(132):
            batch.workspace = DecodeWorkspace(2, 4, 1, 32, device)
        batch.workspace.schedule.update(batch.lengths)
        with pytest.raises(ValueError, match="over 1 KV heads"):
            batch.attend()

    def test_lengths(self, batch):
        schedule = batch.workspace.schedule
        with pytest.raises(ValueError, match="3 rows for a schedule of 1 to 2"):
            schedule.update(torch.ones(3, dtype=torch.int32, device=batch.device))
        with pytest.raises(ValueError, match="int32"):
            schedule.update(batch.lengths.long())


@pytest.mark.gpu
class TestOnGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize(("dtype", "shape", "block_size"), GPU_CASES)
    def test_random_batches(self, dtype, shape, block_size):
        """1,008 batches in all; a step's lengths are as often short as long."""
        cuda = torch.device("cuda")
        draw = random.Random(f"{dtype} {shape}")
        for rows, longest, batches in ((8, 1000, 24), (40, 200, 24), (2, 5000, 8)):
            count = draw.choice((1, 20, 132, 400))
            batch = Batch(longest, rows, block_size, *shape, dtype, cuda, count)
            wide = Batch(longest, rows, block_size, *shape, dtype, cuda, count, width=4)
            for number in range(batches):
                lengths = [int(longest ** draw.random()) for _ in range(rows)]
                chosen = wide if number % 6 == 5 else batch
                expected = chosen.refill(lengths)
                chosen.run(is_settled=True)
                chosen.check(expected)

    @pytest.mark.parametrize("dim", [16, 32, 96, 192, 256])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_head_dims(self, dim, dtype):
        cuda = torch.device("cuda")
        batch = Batch(700, 5, 64, 2, 4, dim, dtype, cuda)
        expected = batch.refill([700, 1, 64, 65, 300])
        batch.run()
        batch.check(expected)

    @pytest.mark.parametrize(("rows", "kv_heads"), [(8, 3), (52, 8), (200, 8)])
    def test_graph_replays_with_other_lengths_and_tables(self, rows, kv_heads):
        """One graph for batches of equal rows, of one long row, and of short rows alone."""
        cuda = torch.device("cuda")
        batch = Batch(900, rows, 64, kv_heads, 3, 128, torch.bfloat16, cuda)
        batch.refill([1] * rows)
        batch.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batch.run(is_settled=True)
        for longest in (900, 64, 1):
            lengths = torch.randint(longest + 1, (rows,), generator=batch.generator).tolist()
            lengths[rows // 2] = 900
            expected = batch.refill(lengths)
            graph.replay()
            batch.check(expected)

    def test_cache_beyond_32_bit_offsets(self):
        """Elements past 2**31: offsets must be 64 bits wide."""
        cuda = torch.device("cuda")
        if torch.cuda.mem_get_info()[0] < 12e9:
            pytest.skip("needs 12 GB free")
        blocks, block_size, kv_heads, dim = 33_000, 64, 8, 128
        cache = torch.empty(blocks, block_size, kv_heads, dim, dtype=torch.bfloat16, device=cuda)
        cache[-1].normal_()
        tables = torch.full((1, 1), blocks - 1, dtype=torch.int32, device=cuda)
        lengths = torch.full((1,), block_size, dtype=torch.int32, device=cuda)
        query = torch.randn(1, kv_heads, dim, dtype=torch.bfloat16, device=cuda)
        out = torch.full_like(query, float("nan"))
        workspace = DecodeWorkspace(1, kv_heads, kv_heads, dim, cuda)
        workspace.schedule.update(lengths)
        paged_decode_attention(query, cache, cache, tables, dim**-0.5, workspace, out)
        k = cache[-1].double()
        weight = (torch.einsum("hd,nhd->hn", query[0].double(), k) * dim**-0.5).softmax(1)
        expected = torch.einsum("hn,nhd->hd", weight, k)
        assert (out[0].double() - expected).norm() < 1e-2 * expected.norm()
