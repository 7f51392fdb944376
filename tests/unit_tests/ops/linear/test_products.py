"""Products of one and of few rows against torch: kernels by given plans."""

import pytest
import torch
import torch.nn.functional as F

from megatron_async.ops.linear.activations import squared_relu_gpu, swiglu_gpu
from megatron_async.ops.linear.long_row import LongRowPlan, long_row_product
from megatron_async.ops.linear.one_row import OneRowPlan, one_row_product
from megatron_async.ops.linear.product_kernel import Wants
from megatron_async.ops.linear.products import WeightShape, choose, choose_for, product_gpu
from megatron_async.ops.linear.resident import ResidentPlan, resident_product
from megatron_async.ops.linear.rms_norm import add_rms_norm, add_rms_norm_gpu
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.linear.tile import TilePlan, tile_product
from megatron_async.ops.linear.warpgroup import WarpgroupPlan, warpgroup_product

HALF, WHOLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = {
    "smollm2-135m": (576, 1536, 49152),
    "qwen3-0.6b": (1024, 3072, 151936),
    "llama-3.1-8b": (4096, 14336, 128256),
}
"""Hidden size, MLP width, vocabulary."""


@pytest.fixture(autouse=True)
def same_numbers(poisoned_memory):
    torch.manual_seed(0)


def random(*shape, dtype=torch.float32, device="cpu", scale=1.0):
    return (scale * torch.randn(*shape, device=device)).to(dtype)


def weight_of(n, k, dtype, device):
    """The middle of a larger tensor of NaN: what is read outside the weight spoils the result."""
    memory = torch.full((n + 8, k), torch.nan, dtype=dtype, device=device)
    memory[4:-4] = random(n, k, dtype=dtype, device=device, scale=k**-0.5)
    return memory[4:-4]


def choose_plan(rows, outputs, k, dtype, gated=False, may_split=False, normed=False):
    """The plan for a product on a GPU of those that were measured; None: cuBLAS's."""
    wants = Wants(rows, normed, activation="swiglu" if gated else "", split=may_split)
    return choose(WeightShape(2 * outputs if gated else outputs, k, dtype), wants).plan


def multiply(x, weight, bias=None, activation="", may_split=False, added=None, places=None):
    """A product by the rule, and what its kernel does not serve."""
    rows, squares = (x.value, x.squares) if isinstance(x, Stream) else (x, None)
    choice = choose_for(
        rows,
        weight,
        norm=isinstance(x, Stream) and squares is None,
        squares=0 if squares is None else squares.size(1),
        residual=added is not None,
        rotate=0 if places is None else places.dim,
        activation=activation,
        split=may_split,
        bias=bias is not None,
    )
    y = product_gpu(x, weight, bias, choice, added, places)
    if activation == choice.met.activation:
        return y
    return swiglu_gpu(y) if activation == "swiglu" else squared_relu_gpu(y)


def expected_product(x, weight, bias=None, activation=""):
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if activation == "swiglu":
        gate, up = exact.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.relu(exact).square() if activation else exact


def assert_close(found, expected, dtype, roundings=1):
    assert not found.isnan().any()
    # Row by row: one wrong row of many must show.
    error = (found.double() - expected).norm(dim=-1)
    limit = roundings * TOLERANCE[dtype] * expected.norm(dim=-1)
    assert (error <= limit).all(), error / expected.norm(dim=-1)


def check_product(product, rows, n, k, plan, activation, dtype, device):
    """Check rows that are not adjacent, and a bias; gives the product's arguments and itself."""
    weight = weight_of(2 * n if activation == "swiglu" else n, k, dtype, device)
    x = random(rows, k + 24, dtype=dtype, device=device)[:, 8 : k + 8]
    found = product(x, weight, None, activation, plan)
    assert found.dtype == dtype
    assert_close(found, expected_product(x, weight, activation=activation), dtype)
    if not activation:
        bias = random(n, dtype=dtype, device=device)
        assert_close(product(x, weight, bias, "", plan), expected_product(x, weight, bias), dtype)
    return (x, weight, None, activation, plan), found


def check_rows_alone(product, *case):
    """A row depends on no other, and the same call gives the same bits."""
    (x, *others), found = check_product(product, *case)
    assert torch.equal(found, product(x, *others))
    assert torch.equal(found[:1], product(x[:1], *others)), "a row depends on the others"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "n", "k", "plan"),
    [
        (1, 16, 64, TilePlan(16, 16, 64, 1, 1, 2, False, 0)),
        (16, 50, 192, TilePlan(16, 32, 64, 1, 2, 4, False, 384)),
        (5, 70, 200, TilePlan(16, 64, 64, 1, 4, 4, True, 0)),
        (17, 40, 130, TilePlan(32, 16, 64, 1, 4, 3, False, 0)),
        (64, 33, 64, TilePlan(64, 32, 32, 1, 4, 3, False, 0)),
    ],
)
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_tiles(rows, n, k, plan, activation, dtype, device):
    check_product(tile_product, rows, n, k, plan, activation, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("k", "splits"), [(256, 2), (192, 3), (200, 2), (320, 3)])
def test_partial_sums(k, splits, dtype, device):
    """Shares may be uneven; the norm that follows adds them up."""
    plan = TilePlan(16, 32, 64, splits, 2, 3, False, 128)
    rows, n = 5, 72
    weight = weight_of(n, k, dtype, device)
    x = random(rows, k, dtype=dtype, device=device)
    parts = tile_product(x, weight, None, "", plan)
    assert parts.shape == (splits, rows, n)
    assert parts.dtype == torch.float32
    assert_close(parts.sum(0), expected_product(x, weight), dtype)
    residual, norm = random(rows, n, dtype=dtype, device=device), random(n, device=device)
    norm = norm.to(dtype)
    found = add_rms_norm_gpu(parts, residual, norm, 1e-5)
    expected = add_rms_norm.reference(parts, residual, norm, 1e-5)
    unsplit = add_rms_norm.reference(parts.sum(0).to(dtype), residual, norm, 1e-5)
    for part, (result, wanted) in enumerate(zip(found, expected, strict=True)):
        assert result.dtype == dtype
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(wanted, unsplit[part])


def test_a_row_does_not_depend_on_the_others(device):
    plan = TilePlan(16, 32, 64, 1, 2, 3, False, 0)
    weight = weight_of(50, 192, torch.float32, device)
    x = random(16, 192, device=device)
    together = tile_product(x, weight, None, "", plan)
    for rows in (1, 7):
        assert torch.equal(tile_product(x[:rows], weight, None, "", plan), together[:rows])


ROW = torch.ones(1, 8)
TILE = TilePlan(16, 16, 64, 1, 1, 2, False, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: one_row_product(ROW, torch.ones(4, 7), None, "", None), r"\(1, 8\) and \(4, 7"),
        (lambda: one_row_product(ROW.half(), torch.ones(4, 8), None, "", None), "one dtype"),
        (lambda: one_row_product(ROW, torch.ones(8, 4).t(), None, "", None), "contiguous"),
        (lambda: one_row_product(torch.ones(2, 8), torch.ones(4, 8), None, "", None), "2 rows"),
        (lambda: one_row_product(ROW, torch.ones(5, 8), None, "swiglu", None), "5 weight rows"),
        (lambda: one_row_product(ROW, torch.ones(4, 8), torch.ones(3), "", None), r"be \(4,\)"),
        (
            lambda: one_row_product(
                Stream(ROW, torch.ones(2, 8), torch.ones(8), 0.0), torch.ones(4, 8), None, "",
                None,
            ),
            "residual is",
        ),
        (
            lambda: one_row_product(
                Stream(ROW, None, torch.ones(7), 0.0), torch.ones(4, 8), None, "", None
            ),
            "norm's weight",
        ),
        (lambda: long_row_product(torch.ones(2, 8), torch.ones(4, 8), None, "", None), "2 rows"),
        (
            lambda: multiply(torch.ones(2, 8), torch.ones(4, 8), added=torch.ones(2, 4)),
            r"\((cuBLAS|torch)\) does not serve residual",
        ),
        (lambda: resident_product(ROW, torch.ones(4, 8), None, "", None), "float32; use"),
        (lambda: warpgroup_product(ROW, torch.ones(4, 8), None, "", None), "16-bit numbers"),
        (
            lambda: warpgroup_product(ROW.half(), torch.ones(4, 9).half()[:, :8], None, "", None),
            "contiguous",
        ),
        (
            lambda: warpgroup_product(
                torch.ones(3, 9).half()[:, :8], torch.ones(4, 8).half(), None, "", None
            ),
            "multiples of 16 bytes",
        ),
        (
            lambda: warpgroup_product(
                ROW.half(), torch.ones(4, 8).half(), torch.ones(4).half(), "",
                WarpgroupPlan(64, 32, 2, 128, 1, 1),
            ),
            "neither bias nor activation",
        ),
        (
            lambda: tile_product(
                ROW, torch.ones(4, 8), torch.ones(4), "",
                TilePlan(16, 16, 64, 2, 1, 2, False, 0),
            ),
            "neither bias nor activation",
        ),
        (
            lambda: add_rms_norm_gpu(torch.ones(2, 1, 8), None, torch.ones(8), 0.0),
            "must be float32, contiguous and have a residual",
        ),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("rows", [1, 2, 16, 33, 64, 65])
    def test_real_shapes(self, shape, rows, dtype):
        hidden, ffn, vocabulary = SHAPES[shape]
        for n, k in ((hidden, hidden), (hidden, ffn), (vocabulary, hidden)):
            weight = weight_of(n, k, dtype, "cuda")
            x = random(rows, k, dtype=dtype, device="cuda")
            expected = expected_product(x, weight)
            assert_close(multiply(x, weight), expected, dtype)
            parts = multiply(x, weight, may_split=True)
            assert_close(parts if parts.dim() == 2 else parts.sum(0), expected, dtype)
        weight = weight_of(2 * ffn, hidden, dtype, "cuda")
        x = random(rows, hidden, dtype=dtype, device="cuda")
        found = multiply(x, weight, activation="swiglu")
        assert_close(found, expected_product(x, weight, activation="swiglu"), dtype)
        found = multiply(x, weight, activation="squared_relu")
        assert_close(found, expected_product(x, weight, activation="squared_relu"), dtype)

    @pytest.mark.parametrize("k", [576, 4096, 8192, 14336])
    def test_a_row_that_is_added(self, k):
        x, stream = random(1, k, dtype=BRAIN, device="cuda"), random(1, 96, device="cuda").to(BRAIN)
        weight = weight_of(96, k, BRAIN, "cuda")
        assert choose_for(x, weight, residual=True).met.residual
        assert not choose_for(x.repeat(2, 1), weight, residual=True).met.residual
        rounded = multiply(x, weight, may_split=True)
        found = multiply(x, weight, may_split=True, added=stream)
        assert torch.equal(found, rounded + stream)

    def test_rows_that_the_copy_engine_does_not_take(self):
        x = random(40, 577, dtype=BRAIN, device="cuda")[:, 1:]
        weight = weight_of(72, 576, BRAIN, "cuda")
        assert_close(multiply(x, weight), expected_product(x, weight), BRAIN)

    @pytest.mark.parametrize(
        ("rows", "n", "k", "plan"),
        [
            (1, 37, 200, ResidentPlan(8, 16, 4)),
            (5, 50, 576, ResidentPlan(8, 16, 2)),
            (16, 50, 576, ResidentPlan(8, 32, 4)),
            (37, 41, 768, ResidentPlan(16, 16, 8)),  # several blocks of rows, the last one ragged
            (16, 64, 1024, ResidentPlan(16, 32, 8)),
        ],
    )
    @pytest.mark.parametrize("norm", ["", "norm", "norm and residual"])
    @pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
    def test_resident_weights(self, rows, n, k, plan, norm, activation):
        weight = weight_of(2 * n if activation == "swiglu" else n, k, BRAIN, "cuda")
        wide = torch.full((rows + 2, k + 24), torch.nan, dtype=BRAIN, device="cuda")
        wide[1:-1, 8:-8] = random(rows, k + 8, device="cuda")
        x = wide[1:-1, 8 : k + 8]  # rows that are not adjacent, among NaN
        given, values = x, x.double()
        if norm:
            residual = random(rows, k, dtype=BRAIN, device="cuda") if "and" in norm else None
            scale = random(k, dtype=BRAIN, device="cuda")
            given = Stream(x, residual, scale, 1e-5)
            total = x if residual is None else x + residual
            values = F.rms_norm(total.double(), (k,), scale.double(), 1e-5)
        found = resident_product(given, weight, None, activation, plan)
        expected = expected_product(values, weight, activation=activation)
        assert_close(found, expected, BRAIN)
        if norm:
            assert torch.equal(given.total, total)
        elif not activation:
            bias = random(n, dtype=BRAIN, device="cuda")
            found = resident_product(x, weight, bias, "", plan)
            assert_close(found, expected_product(x, weight, bias), BRAIN)
            first = resident_product(x[:1], weight, bias, "", plan)
            assert torch.equal(first, found[:1]), "a row depends on the others"

    def test_a_chain_in_a_graph(self):
        """Products that prefetch and start early, each reading what the one before wrote."""
        hidden, ffn, layers, dtype = 576, 1536, 8, torch.bfloat16
        up = [weight_of(2 * ffn, hidden, dtype, "cuda") for _ in range(layers)]
        down = [weight_of(hidden, ffn, dtype, "cuda") for _ in range(layers)]
        norm = torch.ones(hidden, dtype=dtype, device="cuda")
        for rows in (1, 16, 64):
            start = random(rows, hidden, dtype=dtype, device="cuda")

            def chain(start=start):
                x, residual = start, torch.zeros_like(start)
                for fc1, fc2 in zip(up, down, strict=True):
                    stream = Stream(x, residual, norm, 1e-5)
                    if not stream.is_whole:
                        x, residual = add_rms_norm_gpu(x, residual, norm, 1e-5)
                        wide = multiply(x, fc1, activation="swiglu")
                    else:
                        wide = multiply(stream, fc1, activation="swiglu")
                        residual = stream.total
                    x = multiply(wide, fc2, may_split=True)
                return add_rms_norm_gpu(x, residual, norm, 1e-5)[0]

            chain()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = chain()
            first = None
            for _ in range(20):
                out.fill_(torch.nan)
                graph.replay()
                first = out.clone() if first is None else first
                assert torch.equal(out, first)
            x, residual = start.double(), torch.zeros_like(start).double()
            for fc1, fc2 in zip(up, down, strict=True):
                normed, residual = add_rms_norm.reference(x, residual, norm.double(), 1e-5)
                x = expected_product(expected_product(normed, fc1, activation="swiglu"), fc2)
            expected = add_rms_norm.reference(x, residual, norm.double(), 1e-5)[0]
            assert (out - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("product", "n", "k", "plan"),
    [
        (one_row_product, 64, 64, OneRowPlan(4, 64, 2, 0)),
        (one_row_product, 37, 200, OneRowPlan(4, 256, 2, 0)),
        (one_row_product, 50, 576, OneRowPlan(2, 1024, 2, 0)),
        # several steps, the last one ragged
        (one_row_product, 41, 576, OneRowPlan(8, 256, 4, 512)),
        # fewer outputs than a program takes
        (one_row_product, 6, 512, OneRowPlan(8, 128, 4, 0)),
        # the last round has fewer tiles, the last tile less
        (long_row_product, 37, 1000, LongRowPlan(4, 4, 2, 3)),
        # a part of one tile, fewer outputs than a program takes
        (long_row_product, 3, 64, LongRowPlan(4, 4, 3, 1)),
        (long_row_product, 50, 2688, LongRowPlan(8, 4, 11, 7)),
    ],
)
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_one_row(product, n, k, plan, activation, dtype, device):
    check_product(product, 1, n, k, plan, activation, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("product", "plan"),
    [(one_row_product, OneRowPlan(4, 128, 2, 0)), (long_row_product, LongRowPlan(4, 4, 2, 3))],
)
def test_added_to_the_residual(product, plan, dtype, device):
    """The product is rounded, then the sum: the same bits as a product and an addition."""
    weight, x = weight_of(37, 200, dtype, device), random(1, 200, dtype=dtype, device=device)
    stream = random(1, 40, dtype=dtype, device=device)[:, :37]
    rounded = product(x, weight, None, "", plan)
    found = product(x, weight, None, "", plan, stream)
    assert torch.equal(found, (rounded.float() + stream.float()).to(dtype))
    with pytest.raises(ValueError, match=r"must be \(1, 37\)"):
        product(x, weight, None, "", plan, stream[:, :36])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("k", [256, 200])
@pytest.mark.parametrize("block_k", [64, 256])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_one_row_with_norm(k, block_k, with_residual, activation, dtype, device):
    plan = OneRowPlan(4, block_k, 2, 0)
    weight = weight_of(60, k, dtype, device)
    x, residual = random(2, 1, k, dtype=dtype, device=device)
    norm = random(k, dtype=dtype, device=device)
    unnormed = Stream(x, residual if with_residual else None, norm, 1e-5)
    found = one_row_product(unnormed, weight, None, activation, plan)
    total = residual + x if with_residual else x
    normed = F.rms_norm(total.double(), (k,), norm.double(), 1e-5)
    assert torch.equal(unnormed.total, total)
    assert with_residual or unnormed.total is x
    assert_close(found, expected_product(normed, weight, activation=activation), dtype)
    one_program = Stream(x, residual, norm, 1e-5)
    one_row_product(one_program, weight[:3], None, "", plan)
    assert torch.equal(one_program.total, residual + x)


def check_any_rows(rows, n, k, dtype, device):
    """A row's bits are the same alone and in the company of any number of rows."""
    weight, bias = weight_of(n, k, dtype, device), random(n, dtype=dtype, device=device)
    x = random(max(rows), k, dtype=dtype, device=device)
    found, kernels = [], set()
    for count in rows:
        choice = choose_for(x[:count], weight, major=9, bias=True, invariant=True)
        assert choice.met == Wants(count, bias=True, invariant=True)
        kernels.add(choice.kernel.name)
        found.append(product_gpu(x[:count], weight, bias, choice))
    assert_close(found[-1], expected_product(x, weight, bias), dtype)
    for product in found:
        assert torch.equal(product, found[-1][: len(product)])
    return kernels


@pytest.mark.parametrize(("n", "k"), [(40, 200), (72, 336)])
def test_rows_without_company(n, k, device, matrix_units):
    assert check_any_rows((1, 2, 16, 17, 40, 64, 65, 150), n, k, HALF, device) == {
        "tile", "cuBLASLt",
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "kernels"),
    [
        (6144, 4096, {"streamed", "cuBLASLt"}),
        (4096, 14336, {"streamed", "cuBLASLt"}),
        (5120, 2048, {"streamed", "cuBLASLt"}),
        (960, 576, {"streamed", "warpgroup", "cuBLASLt"}),
        (49152, 576, {"tile", "cuBLASLt"}),
    ],
)
def test_rows_without_company_on_a_gpu(n, k, kernels):
    rows = (1, 2, 8, 16, 17, 32, 64, 65, 128, 256, 512, 2048)
    assert check_any_rows(rows, n, k, BRAIN, "cuda") == kernels
