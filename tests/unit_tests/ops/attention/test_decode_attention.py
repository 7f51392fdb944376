"""The paged decode kernel against a gathered softmax in float64.

Whatever no sequence owns is NaN: cells of the cache, the output and the workspace.
"""

import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_async.ops.attention.decode_attention import (
    JOIN_CHUNK,
    DecodeWorkspace,
    paged_decode_attention,
)
from megatron_async.ops.attention.decode_schedule import DecodeSchedule, schedule_reference

SHAPES = [(3, 3, 64), (8, 4, 128), (2, 8, 64), (1, 1, 128), (4, 7, 80), (2, 5, 112)]
"""(KV heads, query heads of each, dimension)."""
GPU_CASES = [
    (dtype, shape, (16, 64, 256)[(i + j) % 3])
    for i, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32))
    for j, shape in enumerate(SHAPES)
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def processors(count):
    """A device of so many processors: with few of them a batch has few parts."""
    properties = SimpleNamespace(multi_processor_count=count)
    return mock.patch.object(torch.cuda, "get_device_properties", return_value=properties)


class Batch:
    """Rows of given lengths in a cache whose blocks are shuffled; `refill` draws others in place.

    Tensors keep their addresses, as a captured graph needs.
    """

    def __init__(
        self, longest, rows, block_size, kv_heads, group, dim, dtype, device, count=132, seed=0,
        width=1, first_key=0,
    ):  # fmt: skip
        self.first_key = first_key
        self.generator = torch.Generator().manual_seed(seed)
        self.kv_heads, self.group, self.dim, self.device = kv_heads, group, dim, device
        self.block_size, self.scale, self.width = block_size, dim**-0.5, width
        blocks_a_row = -(-longest // block_size)
        self.blocks = rows * blocks_a_row + 1
        shape = (self.blocks, block_size, kv_heads, dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        # One column more than is used: the kernel has to mind the row's stride.
        self.tables = torch.empty((rows, blocks_a_row + 1), dtype=torch.int32, device=device)
        self.lengths = torch.empty(rows, dtype=torch.int32, device=device)
        self.query = torch.empty(rows * width, kv_heads * group, dim, dtype=dtype, device=device)
        self.positions = torch.empty(rows * width, dtype=torch.int64, device=device)
        self.out = torch.full_like(self.query, float("nan"))
        with processors(count):
            self.workspace = DecodeWorkspace(rows, kv_heads * group, kv_heads, dim, device, width)
        for tensor in (self.workspace.output, self.workspace.maximum, self.workspace.total):
            tensor.fill_(float("nan"))
        for tensor in (self.workspace.schedule.items, self.workspace.schedule.joins):
            tensor.fill_(2**30)

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def refill(self, lengths, query_scale=1.0):
        """New lengths, tables, keys, values and queries; returns what attention should be."""
        keys, values = (torch.full(self.keys.shape, float("nan")) for _ in "kv")
        # A column beyond a row's length points outside the cache: reading through it is an error.
        tables = torch.full(self.tables.shape, 2**30, dtype=torch.int32)
        order = torch.randperm(self.blocks, generator=self.generator)
        query = (query_scale * self.random(*self.query.shape)).to(self.query.dtype)
        expected = torch.zeros(self.query.shape, dtype=torch.float64)
        for row, length in enumerate(lengths):
            used = -(-length // self.block_size)
            tables[row, :used], order = order[:used], order[used:]
            position = torch.arange(length)
            cells = tables[row, position // self.block_size].long() * self.block_size
            cells += position % self.block_size
            for cache in (keys, values):
                drawn = self.random(length, self.kv_heads, self.dim).to(self.keys.dtype)
                cache.flatten(0, 1)[cells] = drawn.float()
            if length:
                k, v = (
                    cache.flatten(0, 1)[cells].double().repeat_interleave(self.group, 1)
                    for cache in (keys, values)
                )
                for j in range(self.width):
                    # The row's last tokens; beyond a limit they stand at position 0.
                    token, last = row * self.width + j, max(length - self.width + j, 0)
                    self.positions[token] = last
                    seen = slice(min(self.first_key, last), last + 1)
                    seen_k, seen_v = k[seen], v[seen]
                    score = torch.einsum("hd,nhd->hn", query[token].double(), seen_k) * self.scale
                    expected[token] = torch.einsum("hn,nhd->hd", score.softmax(1), seen_v)
        self.keys.copy_(keys)
        self.values.copy_(values)
        self.tables.copy_(tables)
        self.query.copy_(query)
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.out.fill_(float("nan"))
        return expected

    def run(self, is_settled=False):
        self.workspace.schedule.update(self.lengths)
        if is_settled:
            self.out.fill_(float("nan"))  # a kernel between
        self.attend(is_settled)

    def attend(self, is_settled=False):
        paged_decode_attention(
            self.query,
            self.keys,
            self.values,
            self.tables,
            self.scale,
            self.workspace,
            self.out,
            is_settled,
            self.positions if self.width > 1 else None,
            self.first_key,
        )

    def check(self, expected):
        found, tolerance = self.out.cpu().double(), TOLERANCE[self.out.dtype]
        assert not found.isnan().any()
        for row, length in enumerate(self.lengths.tolist()):
            for token in range(row * self.width, (row + 1) * self.width):
                error = (found[token] - expected[token]).norm()
                assert error <= tolerance * expected[token].norm(), (row, token, length, error)


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
def test_more_parts_than_are_joined_at_once(is_settled, width, device):
    """Maxima grow and shrink from chunk to chunk; of the last one some query tokens see nothing."""
    lengths = [64 * JOIN_CHUNK + width - 1, 70, 64 * (2 * JOIN_CHUNK + 3)]
    batch = Batch(max(lengths), 3, 64, 1, 2, 32, torch.float32, device, width=width)
    expected = batch.refill(lengths, query_scale=10.0)
    _items, joins = schedule_reference(lengths, batch.workspace.schedule.extra, 64)
    assert [parts for _row, _slot, parts in joins] == [
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


@pytest.mark.parametrize(("count", "kv_heads"), [(132, 8), (132, 3), (7, 1), (1, 8)])
@pytest.mark.parametrize("tile", [64, 32])
def test_schedule(count, kv_heads, tile, device):
    """Every token of every row once, as the reference says, within the bounds that memory is
    sized by."""
    draw = random.Random(count + tile)
    with processors(count):
        schedule = DecodeSchedule(70, kv_heads, tile, device)
    for rows, longest in ((1, 0), (1, 1), (1, 100_000), (70, 400), (64, 64), (33, 5000), (70, 1)):
        lengths = [draw.randint(longest // 2, longest) for _ in range(rows)]
        if rows == 64:
            lengths[9] = 32_768  # one long row
        schedule.items.fill_(2**30)
        schedule.joins.fill_(2**30)
        schedule.update(torch.tensor(lengths, dtype=torch.int32, device=device))
        items = [tuple(item) for item in schedule.items.tolist()]
        joins = [tuple(join[:3]) for join in schedule.joins.tolist()]
        expected_items, expected_joins = schedule_reference(lengths, schedule.extra, tile)
        used, count_joins = len(expected_items), len(expected_joins)
        assert items[:used] == expected_items
        assert used <= rows + schedule.extra
        unused = items[used : rows + schedule.extra]
        assert all(item[:3] == (-1, 0, 0) for item in unused)
        assert joins[0][0] == count_joins <= schedule.max_joins
        assert joins[1 : 1 + count_joins] == expected_joins
        slots = [item[3] for item in expected_items if item[3] >= 0]
        assert slots == list(range(len(slots)))
        assert len(slots) <= schedule.slots
        # A whole row, or the parts of one, from its first token to its last.
        ends = {}
        for row, start, end, _slot in expected_items:
            assert start == ends.get(row, 0)
            assert start % tile == 0
            ends[row] = end
        assert ends == dict(enumerate(lengths))


def test_long_row_is_cut_and_short_ones_are_not(device):
    with processors(132):
        schedule = DecodeSchedule(64, 8, 64, device)
    lengths = [256] * 63 + [32_768]
    items, joins = schedule_reference(lengths, schedule.extra, 64)
    assert joins == [(63, 0, len(items) - 63)]
    assert len(items) - 63 > 16


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


def test_workspace_serves_layers_in_turn(device):
    """What a call leaves in the workspace is nothing to the next one."""
    batch = Batch(300, 3, 64, 1, 4, 32, torch.float32, device, count=4)
    for lengths in ([300, 257, 5], [64, 300, 0], [129, 65, 200]):
        expected = batch.refill(lengths)
        for _layer in range(2):
            batch.run()
            batch.check(expected)
            batch.out.fill_(float("nan"))
            batch.attend()
            batch.check(expected)


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
