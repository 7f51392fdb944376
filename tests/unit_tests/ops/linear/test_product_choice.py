"""The rule that chooses a product's kernel: possible plans, and the cases that cuBLAS keeps."""

import pytest
import torch

from megatron_async.ops.linear.long_row import LONG_ROW_PROGRAMS, LONG_ROW_REGISTERS, LongRowPlan
from megatron_async.ops.linear.product_kernel import MAX_ROWS, PROCESSORS, Wants
from megatron_async.ops.linear.products import (
    CUBLAS,
    INVARIANT,
    WITHOUT_WANTS,
    WeightShape,
    choose,
    choose_for,
)
from megatron_async.ops.linear.resident import ResidentPlan
from megatron_async.ops.linear.streamed import StreamedPlan
from megatron_async.ops.linear.tile import TilePlan
from megatron_async.ops.linear.warpgroup import MOST_ROWS, WarpgroupPlan
from tests.unit_tests.ops.linear.test_products import BRAIN, HALF, WHOLE, choose_plan


@pytest.mark.parametrize("dtype", [HALF, WHOLE, BRAIN])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 33, 64, 65, 128, 256, 512, 768])
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
            assert rows > 16
            weights = plan.chunks * plan.block_n * (1 + gated)
            lines = weights + plan.ring * plan.block_m
            memory = lines * plan.chunk * itemsize + 8 * (plan.chunks + 1)
            assert memory <= 227 * 1024
            if rows > 64:  # all programs run at once; a processor keeps 1 KB of each for itself
                programs = -(-outputs // plan.block_n) * plan.splits * -(-rows // plan.block_m)
                assert programs <= (2 if 2 * (memory + 1024) <= 228 * 1024 else 1) * PROCESSORS
            assert 0 < plan.ring <= plan.chunks
            assert plan.splits == 1 or may_split
            share = plan.chunks * plan.chunk
            assert (plan.splits - 1) * share < k <= plan.splits * share
        elif isinstance(plan, StreamedPlan):
            assert itemsize == 2
            assert rows <= plan.block_m
            assert k % (64 * plan.strips) == 0
            height = sum(plan.pieces)
            assert plan.splits == 1 or may_split
            assert -(-outputs // height) * plan.splits <= PROCESSORS
            lines = plan.block_m + height * (1 + gated)
            assert plan.ring * (lines * 64 * plan.strips * itemsize + 8) <= 227 * 1024
            # Registers of a thread: its sums, of all pieces at once.
            assert 64 * height * (1 + gated) // 128 <= 112
        elif isinstance(plan, LongRowPlan):
            assert rows == 1
            # Registers of a thread: tiles in flight, 4 each.
            assert plan.block_n // plan.warps * plan.depth * 4 <= 48
            # All programs run at once.
            assert LONG_ROW_REGISTERS * 32 * plan.warps * LONG_ROW_PROGRAMS <= 65536
            programs = -(-outputs // (plan.block_n * plan.turns))
            assert programs <= LONG_ROW_PROGRAMS * PROCESSORS
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
    assert choose_plan(MAX_ROWS + 1, 576, 576, WHOLE, False, False) is None
    assert choose_plan(MAX_ROWS + 1, 6144, 4096, BRAIN, False, False) is None
    assert choose_plan(MOST_ROWS, 576, 576, BRAIN, False, True) is not None
    assert choose_plan(MOST_ROWS + 1, 576, 576, BRAIN, False, True) is None
    assert choose_plan(0, 576, 576, BRAIN, False, False) is None
    assert choose_plan(1, 576, 33, BRAIN, False, False) is None
    assert choose_plan(16, 49152, 576, HALF, False, False) is None
    assert choose_plan(17, 49152, 576, BRAIN, False, False) is None
    assert choose_plan(1, 49152, 576, HALF, False, False) is not None
    assert choose_plan(17, 576, 576, WHOLE, False, False) is None
    assert choose_plan(16, 576, 576, WHOLE, False, False) is not None


def test_which_weights_are_resident():
    """Products that were measured to gain: narrow models' from two rows on, none of an 8B model."""

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


def test_wants_that_are_dropped():
    """Which wants a kernel does not serve; none of them changes the kernel."""

    def met(rows, outputs, k, dtype=BRAIN, **wants):
        choice = choose(WeightShape(outputs, k, dtype), Wants(rows, **wants))
        plain = {name: wants[name] for name in ("bias", "activation", "split") if name in wants}
        assert choice.kernel is choose(WeightShape(outputs, k, dtype), Wants(rows, **plain)).kernel
        served = choice.met._asdict().items()
        return choice.kernel.name, {name: want for name, want in served if want and name != "rows"}

    norm = {"norm": True}
    assert met(1, 960, 576, norm=True, rotate=64) == ("one row", norm | {"rotate": 64})
    assert met(1, 960, 576, norm=True, rotate=18) == ("one row", norm)
    assert met(1, 960, 576, norm=True, adapter="small") == ("one row", norm)
    assert met(1, 6144, 4096, norm=True, rotate=128) == ("one row", {})
    assert met(1, 576, 1536, residual=True, split=True) == (
        "one row",
        {"residual": True, "split": True},
    )
    assert met(1, 2048, 8192, residual=True) == ("long row", {"residual": True})
    assert met(1, 1024, 3072, residual=True) == ("resident", {})
    assert met(1, 4096, 8192, residual=True) == ("long row", {})
    assert met(1, 576, 1536, residual=True, bias=True) == ("one row", {"bias": True})
    assert met(8, 960, 576, norm=True, rotate=64, residual=True) == (
        "resident",
        norm | {"rotate": 64},
    )
    assert met(32, 960, 576, norm=True, rotate=64) == ("resident", norm)
    assert met(8, 3072, 2048, norm=True) == ("resident", {})
    assert met(64, 960, 576, norm=True, rotate=64) == ("warpgroup", {"rotate": 64})
    assert met(64, 768, 1536, squares=1, split=True) == ("warpgroup", {"squares": 1, "split": True})
    assert met(64, 768, 1536, squares=2, split=True) == ("warpgroup", {"split": True})
    assert met(1, 768, 1536, HALF, squares=1) == ("one row", {})
    assert met(16, 28672, 4096, norm=True, activation="swiglu", split=True) == (
        "streamed",
        {"activation": "swiglu"},
    )
    assert met(16, 28672, 4096, activation="swiglu", bias=True) == ("tile", {"bias": True})
    assert met(769, 1536, 576, norm=True, activation="squared_relu") == ("cuBLAS", {})
    assert choose(WeightShape(576, 576, BRAIN, 8), Wants(1)).kernel is CUBLAS  # not measured
    ones = torch.ones(1, 8)
    assert choose_for(ones, ones, norm=True, rotate=8) is WITHOUT_WANTS  # no GPU


def test_many_rows_of_narrow_products():
    """Products of SmolLM2's layer, in the layouts that were measured to be fastest in it or within
    0.5 us of that; and which of Qwen3-0.6B's layer are cuBLAS's."""

    def chosen(rows, outputs, k, gated=False, may_split=False):
        plan = choose_plan(rows, outputs, k, BRAIN, gated, may_split)
        return None if plan is None else tuple(vars(plan).values())

    assert chosen(128, 960, 576) == (64, 32, 1, 128, 5, 5)
    assert chosen(128, 576, 576, may_split=True) == (64, 32, 2, 64, 5, 5)
    assert chosen(128, 1536, 576, gated=True) == (64, 32, 1, 64, 9, 9)
    assert chosen(128, 576, 1536, may_split=True) == (64, 32, 2, 128, 6, 6)
    assert chosen(256, 576, 576, may_split=True) == (64, 32, 1, 128, 5, 5)
    assert chosen(256, 1536, 576, gated=True) == (64, 32, 1, 64, 9, 4)
    assert chosen(256, 576, 1536, may_split=True) == (64, 64, 2, 128, 6, 6)
    assert chosen(384, 960, 576) == (64, 64, 1, 128, 5, 5)
    assert chosen(512, 1536, 576, gated=True) == (128, 64, 1, 64, 9, 4)
    assert chosen(512, 576, 1536, may_split=True) == (128, 64, 2, 128, 6, 3)
    assert chosen(128, 4096, 1024) == (64, 64, 1, 128, 8, 5)
    assert chosen(256, 4096, 1024) is None
    assert chosen(256, 3072, 1024, gated=True) is None
    assert chosen(256, 1024, 3072, may_split=True) is None


@pytest.mark.parametrize("outputs", [100, 576, 4096, 6144, 14336, 128256])
@pytest.mark.parametrize("k", [64, 576, 2560, 4096, 14336])
def test_choices_that_do_not_depend_on_rows(outputs, k):
    """One order of sums: other kernels than `INVARIANT`, and all that rounds elsewhere, are out."""
    for rows in (1, 2, 9, 16, 17, 64, 65, 128, 129, 768, 8192):
        wants = Wants(rows, True, 1, True, 64, "swiglu", True, True, "lora", invariant=True)
        for dtype in (BRAIN, HALF):
            choice = choose(WeightShape(outputs, k, dtype), wants)
            assert choice.met == Wants(rows, bias=True, invariant=True)
            assert choice.kernel in INVARIANT
            assert choice.plan.splits == 1
            one = choose(WeightShape(outputs, k, dtype), wants._replace(bias=False))
            rounds = isinstance(one.plan, StreamedPlan) and one.plan.rounds
            assert one.met.activation == ("swiglu" if rounds else "")
        assert choose(WeightShape(outputs, k, WHOLE), wants).kernel is CUBLAS
        assert not choose(WeightShape(outputs, k, WHOLE), wants).met.invariant
    assert not choose(WeightShape(outputs, k, BRAIN, major=8), wants).met.invariant
