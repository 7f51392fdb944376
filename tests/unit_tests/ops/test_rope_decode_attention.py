"""Decode attention from the projection on, against rope_append's reference and a softmax, and
against the two kernels whose work it does.

As in test_decode_attention, whatever no sequence owns is NaN; so is the place of each new token.
"""

import random

import pytest
import torch
from test_decode_attention import GPU_CASES, Batch, processors, softmax_attention
from test_rope_append import tables
from triton_interpreter import EXACT_16_BIT, INTERPRETED, run_in_interpreter

from megatron_async.contexts.batch_dimensions import BatchDimensions
from megatron_async.ops import gpu_paged_attention
from megatron_async.ops.attention_backends.base import AttentionShape
from megatron_async.ops.attention_backends.selection import BACKENDS, STEP_CLASSES, PrefillChoice
from megatron_async.ops.decode_attention import DecodeWorkspace, paged_decode_attention
from megatron_async.ops.gpu_paged_attention import GpuPagedAttention
from megatron_async.ops.rope_append import rope_append, rope_append_reference
from megatron_async.ops.rope_decode_attention import rope_decode_attention
from megatron_async.ops.skinny_linear import linear

EPS = 1e-6


@pytest.mark.skipif(INTERPRETED, reason="starts this very run")
def test_in_interpreter():
    run_in_interpreter(__file__)


class RawBatch(Batch):
    """A batch whose queries and last tokens are still an output of the projection."""

    def __init__(
        self, longest, rows, block_size, kv_heads, group, dim, dtype, device, count, norm, stride=0
    ):
        super().__init__(longest, rows, block_size, kv_heads, group, dim, dtype, device, count)
        width = kv_heads * (group + 2) * dim
        self.qkv = torch.empty(rows, width + stride, dtype=dtype, device=device)[:, :width]
        self.cos, self.sin = tables(longest + 1, dim, device)
        self.positions = torch.empty(rows, dtype=torch.int64, device=device)
        self.places = torch.empty_like(self.positions)
        self.norm = (None, None, 0.0)
        if norm:
            self.norm = (*(1 + torch.rand(2, dim)).to(dtype).to(device), EPS)

    def refill(self, lengths):
        """As `Batch.refill`, with new outputs of the projection; beside what attention should be
        returns what the caches should be afterwards."""
        super().refill(lengths)
        self.qkv.copy_(self.random(*self.qkv.shape))
        self.positions.copy_(torch.tensor(lengths) - 1)
        # A row of no tokens has no place: writing there is an error.
        self.places.copy_(torch.tensor([int(c[-1]) if len(c) else 2**40 for c in self.cells]))
        new = self.places[self.positions >= 0]
        for cache in (self.keys, self.values):
            cache.flatten(0, 1)[new] = torch.nan
        return self.reference()

    def reference(self):
        """What attention and the caches should be, on the CPU."""
        caches = self.keys.cpu().clone(), self.values.cpu().clone()
        real = (self.positions >= 0).nonzero().flatten().cpu()
        tensors = (self.qkv, self.cos, self.sin, self.positions, self.places)
        qkv, cos, sin, positions, places = (tensor.cpu() for tensor in tensors)
        norm = (*(w.cpu() if w is not None else w for w in self.norm[:2]), self.norm[2])
        query = rope_append_reference(
            qkv[real], cos, sin, positions[real], places[real], *caches, *norm
        )
        expected = torch.zeros(self.out.shape, dtype=torch.float64)
        for row, its in zip(real.tolist(), query, strict=True):
            k, v = (cache.flatten(0, 1)[self.cells[row]] for cache in caches)
            expected[row] = softmax_attention(its, k, v, self.scale)
        return expected, caches

    def append(self):
        """The arguments that both ways share."""
        qkv, caches = self.qkv, (self.keys, self.values)
        return (qkv, self.cos, self.sin, self.positions, self.places, *caches, *self.norm)

    def attend(self, is_settled=False):
        self.out = rope_decode_attention(
            *self.append(), self.tables, self.scale, self.workspace, is_settled
        )

    def attend_in_two(self):
        """The same by two kernels."""
        query = rope_append(*self.append())
        self.out = torch.empty_like(query)
        caches = self.keys, self.values
        paged_decode_attention(query, *caches, self.tables, self.scale, self.workspace, self.out)

    def check(self, expected):
        attended, caches = expected
        super().check(attended)
        found = self.keys.cpu(), self.values.cpu()
        # NaN where nothing belongs: the new tokens were written and no other place.
        torch.testing.assert_close(found[0], caches[0], equal_nan=True)
        torch.testing.assert_close(found[1], caches[1], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("lengths", "block_size", "kv_heads", "group", "dim", "dtype", "norm"),
    [
        ([1, 2, 15, 16, 17], 16, 1, 1, 16, torch.float32, False),
        ([0, 63, 64, 65, 0, 200], 64, 3, 3, 64, torch.float32, True),
        ([129, 64, 1], 64, 2, 4, 128, torch.float16, False),
        ([97, 48, 49], 48, 2, 8, 32, torch.float32, True),
        ([65, 1], 16, 1, 20, 64, torch.float32, False),  # more heads than the smallest tile
        ([97, 33], 64, 1, 4, 256, torch.float16, True),  # shorter tiles
        ([130, 1], 64, 2, 3, 80, torch.float32, True),  # no power of two
        ([33, 70], 16, 1, 2, 96, torch.float16, False),
        ([65], 256, 1, 7, 192, torch.float32, True),
    ],
)
@pytest.mark.parametrize("count", [1, 6])
def test_against_softmax(lengths, block_size, kv_heads, group, dim, dtype, norm, count, device):
    shape = (kv_heads, group, dim, dtype, device)
    batch = RawBatch(max(lengths), len(lengths), block_size, *shape, count, norm, stride=3)
    expected = batch.refill(lengths)
    batch.run(is_settled=count == 1)
    batch.check(expected)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *EXACT_16_BIT])
def test_equals_two_kernels(dtype, norm, device):
    """Queries and keys have the bits that `rope_append` gives them, and so has the rest."""
    batch = RawBatch(200, 4, 64, 2, 3, 64, dtype, device, 6, norm)
    batch.refill([200, 1, 65, 64])
    batch.run()
    found = batch.out, batch.keys.clone(), batch.values.clone()
    batch.attend_in_two()
    if dtype in EXACT_16_BIT or not norm:
        torch.testing.assert_close(found, (batch.out, batch.keys, batch.values), **SAME)
    else:  # the interpreter adds squares up in another order; in float32 that is a last bit
        torch.testing.assert_close(found, (batch.out, batch.keys, batch.values), equal_nan=True)


SAME = {"rtol": 0, "atol": 0, "equal_nan": True}


def test_dummy_rows_share_a_place(device):
    """Several rows of the dummy slot write one place; rows of requests do not notice."""
    batch = RawBatch(100, 4, 16, 2, 2, 32, torch.float32, device, 6, norm=False)
    batch.refill([100, 1, 1, 1])
    for row in (2, 3):
        batch.tables[row], batch.places[row] = batch.tables[1], batch.places[1]
        batch.cells[row] = batch.cells[1]
    expected, caches = batch.reference()
    batch.run()
    dummies = batch.places[1:].tolist()
    for found, wanted in zip((batch.keys, batch.values), caches, strict=True):
        found, wanted = found.cpu().flatten(0, 1), wanted.flatten(0, 1)
        assert not found[dummies].isnan().any()
        found[dummies], wanted[dummies] = 0.0, 0.0
        torch.testing.assert_close(found, wanted, equal_nan=True)
    assert (batch.out[0].cpu().double() - expected[0]).norm() < 1e-5 * expected[0].norm()
    assert not batch.out.isnan().any()


def test_backend_waits_in_the_first_layer_of_a_step(device, monkeypatch):
    """A step of decode rows alone takes the one kernel in every layer; of what it may read early,
    nothing is settled before the first layer's kernels stand behind it."""
    rows, kv_heads, group, dim = 3, 2, 2, 32
    batch = RawBatch(70, rows, 16, kv_heads, group, dim, torch.float32, device, 6, norm=True)
    shape = AttentionShape(4, kv_heads, dim, 16, 6, torch.float32, torch.device(device))
    choice = PrefillChoice((BACKENDS["triton"](shape),) * len(STEP_CLASSES))
    with processors(6):
        attention = GpuPagedAttention(16, 6, rows, 4, kv_heads, dim, torch.device(device), choice)
    settled = []

    def seen(*arguments):
        settled.append(arguments[-1])
        return rope_decode_attention(*arguments)

    monkeypatch.setattr(gpu_paged_attention, "rope_decode_attention", seen)
    for lengths in ([70, 1, 17], [16, 33, 2]):
        expected = batch.refill(lengths)
        attention.begin_step(BatchDimensions(decode_rows=rows), batch.tables, batch.lengths)
        for _layer in range(2):
            batch.out = attention.append_and_attend(*batch.append())
            batch.check(expected)
    assert settled == [False, True] * 2


def test_bad_input(device):
    batch = RawBatch(20, 2, 16, 2, 2, 32, torch.float32, device, 6, norm=True)
    batch.refill([20, 7])

    def expect(message, **changes):
        good = {name: getattr(batch, name) for name in changes}
        for name, change in changes.items():
            setattr(batch, name, change)
        with pytest.raises(ValueError, match=message):
            batch.run()
        for name, before in good.items():
            setattr(batch, name, before)

    expect("rows of 255 elements", qkv=batch.qkv[:, :255])
    expect("one dtype", qkv=batch.qkv.half())
    expect("one token a row", positions=batch.positions[:1])
    expect("one token a row", places=batch.places[:1])
    expect("both q_weight and k_weight", norm=(None, *batch.norm[1:]))
    expect("block tables", qkv=batch.qkv[:1])
    with processors(6):
        expect("over 1 KV heads", workspace=DecodeWorkspace(2, 4, 1, 32, device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize(("dtype", "shape", "block_size"), GPU_CASES)
    @pytest.mark.parametrize("norm", [False, True])
    def test_random_batches(self, dtype, shape, block_size, norm):
        """1,008 batches in all; every second one also by two kernels, whose bits must be equal.

        Not so with odd strides and norms: squares are then added in an order of each kernel's own.
        """
        cuda = torch.device("cuda")
        draw = random.Random(f"{dtype} {shape} {norm}")
        for rows, longest, batches in ((8, 1000, 12), (40, 200, 12), (2, 5000, 4)):
            count = draw.choice((1, 20, 132, 400))
            stride = draw.choice((0, 3))
            batch = RawBatch(longest, rows, block_size, *shape, dtype, cuda, count, norm, stride)
            for number in range(batches):
                lengths = [int(longest ** draw.random()) for _ in range(rows)]
                expected = batch.refill(lengths)
                batch.run(is_settled=True)
                batch.check(expected)
                if number % 2 and not (norm and stride):
                    found = batch.out, batch.keys.clone(), batch.values.clone()
                    batch.attend_in_two()
                    exact = SAME if dtype in EXACT_16_BIT else {"equal_nan": True}
                    torch.testing.assert_close(
                        found, (batch.out, batch.keys, batch.values), **exact
                    )

    @pytest.mark.parametrize("dim", [16, 32, 96, 192, 256])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_head_dims(self, dim, dtype):
        cuda = torch.device("cuda")
        batch = RawBatch(700, 5, 64, 2, 4, dim, dtype, cuda, 132, norm=True)
        expected = batch.refill([700, 1, 64, 65, 300])
        batch.run()
        batch.check(expected)

    @pytest.mark.parametrize(("rows", "kv_heads"), [(1, 3), (8, 3), (52, 8), (200, 8)])
    def test_graph_replays_with_other_lengths_and_tables(self, rows, kv_heads):
        cuda = torch.device("cuda")
        batch = RawBatch(900, rows, 64, kv_heads, 3, 128, torch.bfloat16, cuda, 132, norm=False)
        batch.refill([1] * rows)
        batch.run(is_settled=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batch.run(is_settled=True)
        for longest in (900, 64, 1):
            lengths = torch.randint(1, longest + 1, (rows,), generator=batch.generator).tolist()
            lengths[rows // 2] = 900
            expected = batch.refill(lengths)
            batch.out.fill_(torch.nan)
            graph.replay()
            batch.check(expected)

    @pytest.mark.parametrize("rows", [1, 16])
    def test_behind_products_that_let_it_start(self, rows):
        """Four layers of product, attention, product in a graph; all but the first read schedule
        and tables without waiting for the product. Steps of other lengths replayed back to back
        must give what two kernels give in steps that are waited for."""
        cuda, steps, longest = torch.device("cuda"), 40, 3000
        batch = RawBatch(longest, rows, 64, 2, 4, 64, torch.bfloat16, cuda, 132, norm=False)
        batch.refill([longest] * rows)
        width, hidden = batch.qkv.size(1), 8 * 64
        weights = torch.randn(4, width + hidden, hidden, device=cuda) / hidden**0.5
        weights = weights.to(torch.bfloat16)
        x = torch.randn(rows, hidden, device=cuda).to(torch.bfloat16)
        draw = random.Random(rows)
        lengths = [[draw.randint(1, longest) for _ in range(rows)] for _ in range(steps)]
        lengths = torch.tensor(lengths, device=cuda)
        cells = torch.stack(batch.cells).to(cuda)  # [rows, longest]
        places = cells[torch.arange(rows, device=cuda), lengths - 1]  # [steps, rows]
        number = torch.zeros(1, dtype=torch.int64, device=cuda)
        outputs = torch.empty(steps, rows, hidden, dtype=torch.bfloat16, device=cuda)
        start = torch.randn_like(batch.keys), torch.randn_like(batch.values)

        def step(in_two=False):
            batch.places.copy_(places.index_select(0, number)[0])
            batch.lengths.copy_(lengths.index_select(0, number)[0])
            batch.positions.copy_(batch.lengths - 1)
            batch.workspace.schedule.update(batch.lengths)
            out = x
            for layer, weight in enumerate(weights):
                batch.qkv = linear(out, weight[:width])
                if in_two:
                    batch.attend_in_two()
                else:
                    batch.attend(is_settled=layer > 0)
                out = linear(batch.out.flatten(1), weight[width:])
            outputs.index_copy_(0, number, out[None])
            number.add_(1)

        def from_the_start(one_step):
            batch.keys.copy_(start[0])
            batch.values.copy_(start[1])
            number.zero_()
            outputs.fill_(torch.nan)
            for _ in range(steps):
                one_step()
            torch.cuda.synchronize()
            return outputs.clone(), batch.keys.clone(), batch.values.clone()

        def waited_for():
            step(in_two=True)
            torch.cuda.synchronize()

        expected = from_the_start(waited_for)
        assert not expected[0].isnan().any()
        number.zero_()
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            torch.testing.assert_close(from_the_start(graph.replay), expected, **SAME)
