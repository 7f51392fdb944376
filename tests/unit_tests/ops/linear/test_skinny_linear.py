"""Products of few rows against torch: kernels by given plans, and the rule that chooses."""

import pytest
import torch
import torch.nn.functional as F

from megatron_async.ops.linear import skinny_linear as ops
from megatron_async.ops.linear.planned_products import (
    long_row_product,
    one_row_product,
    resident_product,
    tile_product,
    warpgroup_product,
)
from megatron_async.ops.linear.rms_norm import add_rms_norm, add_rms_norm_reference
from megatron_async.ops.linear.skinny_plan import (
    MAX_ROWS,
    LongRowPlan,
    OneRowPlan,
    ResidentPlan,
    TilePlan,
    WarpgroupPlan,
    adds_residual,
    choose_plan,
    takes_unnormed,
)
from megatron_async.ops.linear.unnormed import Unnormed

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("n", "k", "plan"),
    [
        (64, 64, OneRowPlan(4, 64, 2, 0)),
        (37, 200, OneRowPlan(4, 256, 2, 0)),
        (50, 576, OneRowPlan(2, 1024, 2, 0)),
        (41, 576, OneRowPlan(8, 256, 4, 512)),  # several steps, the last one ragged
        (6, 512, OneRowPlan(8, 128, 4, 0)),  # fewer outputs than a program takes
    ],
)
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_one_row(n, k, plan, activation, dtype, device):
    weight = weight_of(2 * n if activation == "swiglu" else n, k, dtype, device)
    x = random(1, k, dtype=dtype, device=device)
    found = one_row_product(x, weight, None, activation, plan)
    assert found.dtype == dtype
    assert_close(found, expected_product(x, weight, activation=activation), dtype)
    if not activation:
        bias = random(n, dtype=dtype, device=device)
        found = one_row_product(x, weight, bias, "", plan)
        assert_close(found, expected_product(x, weight, bias), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("product", "plan"),
    [(one_row_product, OneRowPlan(4, 128, 2, 0)), (long_row_product, LongRowPlan(4, 4, 2))],
)
def test_added_to_the_residual(product, plan, dtype, device):
    """As a product and the next norm's kernel: the product is rounded, then the sum."""
    weight, x = weight_of(37, 200, dtype, device), random(1, 200, dtype=dtype, device=device)
    stream = random(1, 40, dtype=dtype, device=device)[:, :37]
    rounded = product(x, weight, None, "", plan)
    found = product(x, weight, None, "", plan, stream)
    assert torch.equal(found, (rounded.float() + stream.float()).to(dtype))
    with pytest.raises(ValueError, match=r"must be \(1, 37\)"):
        product(x, weight, None, "", plan, stream[:, :36])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("n", "k", "plan"),
    [
        (37, 1000, LongRowPlan(4, 4, 2)),  # the last round has fewer tiles, the last tile less
        (3, 64, LongRowPlan(4, 4, 3)),  # a part of one tile, fewer outputs than a program takes
        (50, 2688, LongRowPlan(8, 4, 6)),
    ],
)
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_long_row(n, k, plan, activation, dtype, device):
    weight = weight_of(2 * n if activation == "swiglu" else n, k, dtype, device)
    x = random(1, k, dtype=dtype, device=device)
    found = long_row_product(x, weight, None, activation, plan)
    assert found.dtype == dtype
    assert_close(found, expected_product(x, weight, activation=activation), dtype)
    if not activation:
        bias = random(n, dtype=dtype, device=device)
        found = long_row_product(x, weight, bias, "", plan)
        assert_close(found, expected_product(x, weight, bias), dtype)


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
    unnormed = Unnormed(x, residual if with_residual else None, norm, 1e-5)
    found = one_row_product(unnormed, weight, None, activation, plan)
    total = residual + x if with_residual else x
    normed = F.rms_norm(total.double(), (k,), norm.double(), 1e-5)
    assert torch.equal(unnormed.total, total)
    assert with_residual or unnormed.total is x
    assert_close(found, expected_product(normed, weight, activation=activation), dtype)
    one_program = Unnormed(x, residual, norm, 1e-5)
    one_row_product(one_program, weight[:3], None, "", plan)
    assert torch.equal(one_program.total, residual + x)


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
    weight = weight_of(2 * n if activation == "swiglu" else n, k, dtype, device)
    wide = random(rows, k + 24, dtype=dtype, device=device)
    x = wide[:, 8 : k + 8]  # rows that are not adjacent
    found = tile_product(x, weight, None, activation, plan)
    assert found.dtype == dtype
    assert_close(found, expected_product(x, weight, activation=activation), dtype)
    if not activation:
        bias = random(n, dtype=dtype, device=device)
        found = tile_product(x, weight, bias, "", plan)
        assert_close(found, expected_product(x, weight, bias), dtype)


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
    found = add_rms_norm(parts, residual, norm, 1e-5)
    expected = add_rms_norm_reference(parts, residual, norm, 1e-5)
    unsplit = add_rms_norm_reference(parts.sum(0).to(dtype), residual, norm, 1e-5)
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
                Unnormed(ROW, torch.ones(2, 8), torch.ones(8), 0.0), torch.ones(4, 8), None, "",
                None,
            ),
            "residual is",
        ),
        (
            lambda: one_row_product(
                Unnormed(ROW, None, torch.ones(7), 0.0), torch.ones(4, 8), None, "", None
            ),
            "norm's weight",
        ),
        (lambda: long_row_product(torch.ones(2, 8), torch.ones(4, 8), None, "", None), "2 rows"),
        (
            lambda: ops._product(
                torch.ones(2, 8), torch.ones(4, 8), None, "", False, torch.ones(2, 4)
            ),
            "adds nothing",
        ),
        (lambda: resident_product(ROW, torch.ones(4, 8), None, "", None), "float32; use"),
        (lambda: warpgroup_product(ROW, torch.ones(4, 8), None, "", None), "1 rows of"),
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
                WarpgroupPlan(32, 2, 128, 1, 1),
            ),
            "neither bias nor activation",
        ),
        (lambda: tile_product(torch.ones(17, 8), torch.ones(4, 8), None, "", TILE), "17 rows"),
        (
            lambda: tile_product(
                ROW, torch.ones(4, 8), torch.ones(4), "",
                TilePlan(16, 16, 64, 2, 1, 2, False, 0),
            ),
            "neither bias nor activation",
        ),
        (
            lambda: add_rms_norm(torch.ones(2, 1, 8), None, torch.ones(8), 0.0),
            "must be float32, contiguous and have a residual",
        ),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


HALF, WHOLE, BRAIN = torch.float16, torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [HALF, WHOLE, BRAIN])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 33, 64])
@pytest.mark.parametrize("outputs", [1, 100, 576, 960, 4096, 6144, 14336, 128256])
@pytest.mark.parametrize("k", [64, 576, 1024, 1536, 2560, 4096, 14336])
def test_plans_are_possible(rows, outputs, k, dtype):
    itemsize = dtype.itemsize
    for gated, may_split in ((False, False), (True, False), (False, True)):
        plan = choose_plan(rows, outputs, k, dtype, gated, may_split)
        if isinstance(plan, TilePlan):
            stage = (plan.block_m + plan.block_n * (1 + gated)) * plan.block_k * itemsize
            assert stage * (plan.stages - 1) <= 227 * 1024
            assert plan.block_m >= rows
            assert plan.splits == 1 or may_split
            share = -(-k // (plan.splits * plan.block_k)) * plan.block_k
            assert (plan.splits - 1) * share < k <= plan.splits * share
            assert plan.ahead % 16 == 0
            assert plan.ahead <= min(share, k) * itemsize
            assert plan.block_n <= 32 * plan.warps or not plan.ahead
        elif isinstance(plan, ResidentPlan):
            assert dtype == BRAIN
            # 32-bit registers of a thread: weights, and the rows of a product without a norm.
            padded = -(-k // (16 * plan.warps)) * 16
            weights = plan.block_n * padded * (1 + gated) // 64
            assert weights <= 128
            assert weights + plan.block_m * padded // 64 <= 192
        elif isinstance(plan, WarpgroupPlan):
            assert dtype == BRAIN
            assert 16 < rows <= 64
            weights = plan.chunks * plan.block_n * (1 + gated)
            memory = (weights + plan.ring * 64) * plan.chunk * itemsize + 8 * (plan.chunks + 1)
            assert memory <= 227 * 1024
            assert 0 < plan.ring <= plan.chunks
            assert plan.splits == 1 or may_split
            share = plan.chunks * plan.chunk
            assert (plan.splits - 1) * share < k <= plan.splits * share
        elif isinstance(plan, LongRowPlan):
            assert rows == 1
            # Registers of a thread: tiles in flight, 4 each.
            assert plan.block_n // plan.warps * plan.depth * (1 + gated) * 4 <= 64
        elif plan is not None:
            assert rows == 1
            assert plan.ahead % 16 == 0
            assert plan.ahead <= k * itemsize
            assert plan.ahead == 0 or plan.block_n <= 32 * plan.warps
            normed = choose_plan(1, outputs, k, dtype, gated, may_split, normed=True)
            assert (normed.block_n, normed.block_k) == (plan.block_n, plan.block_k)
            # Sums that a thread holds; 256 registers are all there are.
            assert normed.block_n * normed.block_k * (1 + gated) <= 128 * 32 * normed.warps


def test_what_is_cublass():
    assert choose_plan(MAX_ROWS + 1, 576, 576, BRAIN, False, False) is None
    assert choose_plan(0, 576, 576, BRAIN, False, False) is None
    assert choose_plan(1, 576, 33, BRAIN, False, False) is None
    assert choose_plan(16, 49152, 576, HALF, False, False) is None
    assert choose_plan(17, 49152, 576, BRAIN, False, False) is None
    assert choose_plan(1, 49152, 576, HALF, False, False) is not None
    assert choose_plan(17, 576, 576, WHOLE, False, False) is None
    assert choose_plan(16, 576, 576, WHOLE, False, False) is not None


def test_which_weights_are_resident():
    """Those that were measured to gain: narrow models' from two rows on, none of an 8B model."""

    def is_resident(rows, outputs, k, gated=False, dtype=BRAIN):
        return isinstance(choose_plan(rows, outputs, k, dtype, gated, True), ResidentPlan)

    assert all(is_resident(rows, 960, 576) for rows in (2, 8, 16))
    assert isinstance(choose_plan(32, 960, 576, BRAIN, False, False), ResidentPlan)
    assert not is_resident(1, 960, 576)
    assert is_resident(1, 1536, 576, gated=True)
    assert not is_resident(33, 960, 576)
    assert not is_resident(2, 960, 576, dtype=HALF)
    assert is_resident(8, 3072, 2048)
    assert not is_resident(16, 3072, 2048)
    assert is_resident(16, 1024, 2048)
    assert not is_resident(2, 8192, 2048, gated=True)
    assert not is_resident(2, 4096, 4096)
    assert is_resident(16, 49152, 576)
    assert not is_resident(2, 128256, 4096)


def test_partial_sums_are_normed_before():
    assert takes_unnormed(torch.ones(1, 8))
    assert not takes_unnormed(torch.ones(1, 1, 8))
    assert not takes_unnormed(torch.ones(2, 8, dtype=BRAIN))  # no GPU
    assert not takes_unnormed(torch.ones(1, 4096))
    assert not adds_residual(torch.ones(1, 4), torch.ones(4, 8))  # no GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
            assert_close(ops.linear(x, weight), expected, dtype)
            parts = ops.linear(x, weight, may_split=True)
            assert_close(parts if parts.dim() == 2 else parts.sum(0), expected, dtype)
        weight = weight_of(2 * ffn, hidden, dtype, "cuda")
        x = random(rows, hidden, dtype=dtype, device="cuda")
        found = ops.linear_swiglu(x, weight)
        assert_close(found, expected_product(x, weight, activation="swiglu"), dtype)
        found = ops.linear_squared_relu(x, weight)
        assert_close(found, expected_product(x, weight, activation="squared_relu"), dtype)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        ("rows", "n", "k", "plan"),
        [
            (64, 100, 576, WarpgroupPlan(32, 1, 128, 5, 5)),
            (17, 33, 768, WarpgroupPlan(16, 1, 128, 6, 2)),  # a ring that is filled three times
            (1, 64, 64, WarpgroupPlan(64, 1, 128, 1, 1)),
            (50, 72, 1024, WarpgroupPlan(32, 1, 256, 4, 3)),
        ],
    )
    @pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
    def test_warpgroups(self, rows, n, k, plan, activation, dtype):
        weight = weight_of(2 * n if activation == "swiglu" else n, k, dtype, "cuda")
        wide = random(rows, k + 24, dtype=dtype, device="cuda")
        x = wide[:, 8 : k + 8]  # rows that are not adjacent
        found = warpgroup_product(x, weight, None, activation, plan)
        assert_close(found, expected_product(x, weight, activation=activation), dtype)
        assert torch.equal(found, warpgroup_product(x, weight, None, activation, plan))
        if not activation:
            bias = random(n, dtype=dtype, device="cuda")
            found = warpgroup_product(x, weight, bias, "", plan)
            assert_close(found, expected_product(x, weight, bias), dtype)

    @pytest.mark.parametrize(("k", "splits", "chunks"), [(768, 2, 3), (1500, 3, 4), (200, 2, 1)])
    def test_partial_sums_of_warpgroups(self, k, splits, chunks):
        x = random(40, k, dtype=BRAIN, device="cuda")
        weight = weight_of(72, k, BRAIN, "cuda")
        plan = WarpgroupPlan(32, splits, 128, chunks, min(chunks, 3))
        if k % 8:
            with pytest.raises(ValueError, match="16 bytes"):
                warpgroup_product(x, weight, None, "", plan)
            return
        parts = warpgroup_product(x, weight, None, "", plan)
        assert parts.shape == (splits, 40, 72)
        assert_close(parts.sum(0), expected_product(x, weight), BRAIN)

    @pytest.mark.parametrize("k", [576, 4096, 8192, 14336])
    def test_a_row_that_is_added(self, k):
        x, stream = random(1, k, dtype=BRAIN, device="cuda"), random(1, 96, device="cuda").to(BRAIN)
        weight = weight_of(96, k, BRAIN, "cuda")
        assert adds_residual(stream, weight)
        assert not adds_residual(stream.repeat(2, 1), weight)
        rounded = ops.linear(x, weight, may_split=True)
        found = ops.linear(x, weight, None, True, stream)
        assert torch.equal(found, rounded + stream)

    def test_rows_that_the_copy_engine_does_not_take(self):
        x = random(40, 577, dtype=BRAIN, device="cuda")[:, 1:]
        weight = weight_of(72, 576, BRAIN, "cuda")
        assert_close(ops.linear(x, weight), expected_product(x, weight), BRAIN)

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
    @pytest.mark.parametrize("norm", ["", "norm", "norm and residual", "gate before the norm"])
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
            gate = wide[1:-1, 16:-8] if "gate" in norm else None
            given = Unnormed(x, residual, scale, 1e-5, gate)
            total = x if residual is None else x + residual
            values = total.double() if gate is None else x.double() * F.silu(gate.double())
            values = F.rms_norm(values, (k,), scale.double(), 1e-5)
        found = resident_product(given, weight, None, activation, plan)
        expected = expected_product(values, weight, activation=activation)
        # A gate makes a few elements of a row large: their rounding is more of its length.
        assert_close(found, expected, BRAIN, roundings=2 if "gate" in norm else 1)
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
                    if takes_unnormed(x):
                        unnormed = Unnormed(x, residual, norm, 1e-5)
                        wide, residual = ops.linear_swiglu(unnormed, fc1), unnormed.total
                    else:
                        x, residual = add_rms_norm(x, residual, norm, 1e-5)
                        wide = ops.linear_swiglu(x, fc1)
                    x = ops.linear(wide, fc2, may_split=True)
                return add_rms_norm(x, residual, norm, 1e-5)[0]

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
                normed, residual = add_rms_norm_reference(x, residual, norm.double(), 1e-5)
                x = expected_product(expected_product(normed, fc1, activation="swiglu"), fc2)
            expected = add_rms_norm_reference(x, residual, norm.double(), 1e-5)[0]
            assert (out - expected).norm() < 0.03 * expected.norm()
