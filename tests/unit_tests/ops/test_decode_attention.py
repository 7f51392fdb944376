"""The paged decode kernel against a gathered softmax in float64.

Whatever no sequence owns is NaN: cells of the cache, the output and the workspace.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import interpreter

from megatron_async.ops.decode_attention import (
    TOKENS_A_PART,
    DecodeWorkspace,
    paged_decode_attention,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


_TRITONS_PATCH = interpreter._patch_lang_tensor


def patch_lang_tensor(tensor, scope):
    """Triton 3.6's interpreter takes `int()` of an array of one element where a loop's bound is on
    the device; NumPy 2.5 refuses that."""
    _TRITONS_PATCH(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


@pytest.fixture
def device(monkeypatch) -> torch.device:
    if INTERPRETED:
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.skip("no GPU: test_in_interpreter runs it")


@pytest.mark.skipif(INTERPRETED, reason="starts this very run")
def test_in_interpreter():
    """Triton reads the variable when it is imported, so the interpreter needs its own process."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


class Batch:
    """Rows of given lengths in a cache whose blocks are shuffled; `refill` draws others in place.

    Tensors keep their addresses, as a captured graph needs.
    """

    def __init__(self, longest, rows, block_size, kv_heads, group, dim, dtype, device, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.kv_heads, self.group, self.dim, self.device = kv_heads, group, dim, device
        self.block_size, self.scale = block_size, dim**-0.5
        blocks_a_row = -(-longest // block_size)
        self.blocks = rows * blocks_a_row + 1
        shape = (self.blocks, block_size, kv_heads, dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        # One column more than is used: the kernel has to mind the row's stride.
        self.tables = torch.empty((rows, blocks_a_row + 1), dtype=torch.int32, device=device)
        self.lengths = torch.empty(rows, dtype=torch.int32, device=device)
        self.query = torch.empty(rows, kv_heads * group, dim, dtype=dtype, device=device)
        self.out = torch.full_like(self.query, float("nan"))
        self.workspace = DecodeWorkspace(rows, kv_heads * group, dim, device)
        for tensor in (self.workspace.output, self.workspace.maximum, self.workspace.total):
            tensor.fill_(float("nan"))

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
                score = torch.einsum("hd,nhd->hn", query[row].double(), k) * self.scale
                expected[row] = torch.einsum("hn,nhd->hd", score.softmax(1), v)
        self.keys.copy_(keys)
        self.values.copy_(values)
        self.tables.copy_(tables)
        self.query.copy_(query)
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.out.fill_(float("nan"))
        return expected

    def run(self, parts):
        paged_decode_attention(
            self.query,
            self.keys,
            self.values,
            self.tables,
            self.lengths,
            self.scale,
            parts,
            self.workspace,
            self.out,
        )

    def check(self, expected):
        found, tolerance = self.out.cpu().double(), TOLERANCE[self.out.dtype]
        assert not found.isnan().any()
        for row, length in enumerate(self.lengths.tolist()):
            error = (found[row] - expected[row]).norm()
            assert error <= tolerance * expected[row].norm(), (row, length, error)


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
    ],
)
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_against_softmax(lengths, block_size, kv_heads, group, dim, dtype, parts, device):
    batch = Batch(max(lengths), len(lengths), block_size, kv_heads, group, dim, dtype, device)
    expected = batch.refill(lengths)
    batch.run(parts)
    batch.check(expected)


def test_number_of_parts_does_not_matter_to_short_rows(device):
    """A row of one part takes the same path whatever other rows need: bit for bit."""
    batch = Batch(200, 2, 16, 2, 3, 64, torch.float32, device)
    batch.refill([TOKENS_A_PART, 200])
    batch.run(1)
    alone = batch.out.clone()
    batch.run(4)
    assert torch.equal(batch.out[0], alone[0])
    assert not torch.equal(batch.out[1], alone[1])  # joined from parts: other roundings


def test_workspace_serves_layers_in_turn(device):
    """What a call leaves in the workspace is nothing to the next one."""
    batch = Batch(300, 3, 64, 1, 4, 32, torch.float32, device)
    for lengths, parts in (([300, 257, 5], 4), ([64, 300, 0], 8), ([129, 65, 200], 2)):
        expected = batch.refill(lengths)
        batch.run(parts)
        batch.check(expected)


def test_scores_far_from_zero(device):
    """Scores of some hundreds, whose exponentials overflow: only differences may be taken."""
    batch = Batch(150, 2, 16, 1, 2, 32, torch.float16, device)
    expected = batch.refill([150, 40], query_scale=100.0)
    batch.run(2)
    batch.check(expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("block_size", [16, 64, 256])
    @pytest.mark.parametrize(("kv_heads", "group", "dim"), [(3, 3, 64), (8, 4, 128), (2, 8, 64)])
    def test_random_batches(self, dtype, block_size, kv_heads, group, dim):
        cuda = torch.device("cuda")
        rows, longest = 12, 1500
        batch = Batch(longest, rows, block_size, kv_heads, group, dim, dtype, cuda)
        for parts in (1, 2, 4, 8, 16, 64):
            lengths = torch.randint(longest + 1, (rows,), generator=batch.generator).tolist()
            expected = batch.refill(lengths)
            batch.run(parts)
            batch.check(expected)

    @pytest.mark.parametrize("parts", [1, 8])
    def test_graph_replays_with_other_lengths_and_tables(self, parts):
        cuda = torch.device("cuda")
        batch = Batch(900, 8, 64, 3, 3, 64, torch.bfloat16, cuda)
        batch.refill([1] * 8)
        batch.run(parts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batch.run(parts)
        for _ in range(10):
            lengths = torch.randint(901, (8,), generator=batch.generator).tolist()
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
        workspace = DecodeWorkspace(1, kv_heads, dim, cuda)
        paged_decode_attention(query, cache, cache, tables, lengths, dim**-0.5, 1, workspace, out)
        k = cache[-1].double()
        weight = (torch.einsum("hd,nhd->hn", query[0].double(), k) * dim**-0.5).softmax(1)
        expected = torch.einsum("hn,nhd->hd", weight, k)
        assert (out[0].double() - expected).norm() < 1e-2 * expected.norm()
