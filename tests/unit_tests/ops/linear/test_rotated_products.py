"""Products that rotate and append their outputs, against a product and `rope_append`."""

import re
from dataclasses import replace

import pytest
import torch

from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.attention.narrow_cache import NARROW
from megatron_async.ops.linear import products
from megatron_async.ops.linear import warpgroup as kernel_module
from megatron_async.ops.linear.one_row import OneRowPlan, one_row_product
from megatron_async.ops.linear.qkv_places import QkvPlaces
from megatron_async.ops.linear.resident import ResidentPlan, resident_product
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.linear.warpgroup import WarpgroupPlan, warpgroup_product
from tests.unit_tests.ops.attention.decode_batch import some_scales
from tests.unit_tests.ops.linear.gluon_emulator import EmulatedKernel
from tests.unit_tests.ops.linear.test_products import (
    BRAIN,
    assert_close,
    choose_plan,
    multiply,
    random,
    weight_of,
)
from tests.unit_tests.ops.linear.test_resident_kernel import NARROW_TYPES, TYPES, spilled_bytes
from tests.unit_tests.ops.linear.test_resident_kernel import compiled as compiled_resident
from tests.unit_tests.ops.linear.test_warpgroup_kernel import compiled as compiled_warpgroup
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

HEADS = [(3, 3, 64), (2, 4, 32), (1, 1, 128)]
"""(KV heads, query heads of each, elements of a head)."""
compiles = pytest.mark.skipif(INTERPRETED, reason="compiles")


@pytest.fixture(autouse=True)
def same_numbers(poisoned_memory):
    torch.manual_seed(0)


def places_of(rows, kv_heads, dim, dtype, device, is_narrow=False):
    """Random positions; places in caches of NaN, more than the rows need."""
    angles = random(50, dim // 2, device=device) * 3
    angles = torch.cat((angles, angles), 1)
    positions = torch.randint(50, (rows + 2,), device=device)
    write_index = torch.randperm(7 * 16 * -(-rows // 64), device=device)[: rows + 2]
    blocks = write_index.numel() + 200
    caches = torch.full((2, blocks, 16, kv_heads, dim), torch.nan, dtype=dtype, device=device)
    scales = some_scales(kv_heads, device) if is_narrow else None
    caches = [cache.to(NARROW) if is_narrow else cache for cache in caches]
    return QkvPlaces(angles.cos(), angles.sin(), positions, write_index, *caches, scales)


def copy_of(places):
    caches = places.key_cache.clone(), places.value_cache.clone()
    return replace(places, key_cache=caches[0], value_cache=caches[1])


def check(
    product, rows, heads, k, dtype, device, normed=False, biased=False, is_narrow=False
):  # fmt: skip
    """Queries, keys and values are right, and nothing else is written."""
    kv_heads, group, dim = heads
    outputs = kv_heads * (group + 2) * dim
    weight = weight_of(outputs, k, dtype, device)
    x = random(rows, k + 24, dtype=dtype, device=device)[:, 8 : k + 8]
    bias = random(outputs, dtype=dtype, device=device) if biased else None
    places = places_of(rows, kv_heads, dim, dtype, device, is_narrow)
    expected_places = copy_of(places)
    if normed:
        residual = random(rows, k, dtype=dtype, device=device)
        factors = (1 + random(k, device=device) / 8).to(dtype)
        given, reference = (Stream(x, residual, factors, 1e-5) for _ in "ab")
    else:
        given = reference = x
    expected = products.product.reference(reference, weight, bias, places=expected_places)
    found = product(given, weight, bias, places)
    assert found.shape == (rows, kv_heads * group, dim)
    assert_close(found.flatten(1), expected.flatten(1), dtype)
    for cache, theirs in (
        (places.key_cache, expected_places.key_cache),
        (places.value_cache, expected_places.value_cache),
    ):
        cache, theirs = (each.float() if is_narrow else each for each in (cache, theirs))
        assert torch.equal(cache.isnan(), theirs.isnan()), "another place was written"
        cells = places.write_index[:rows]
        mine, other = (c.flatten(0, 1)[cells].flatten(1) for c in (cache, theirs))
        if is_narrow:
            # The same numbers, but for some that round to a neighbour; where rotation subtracts, a
            # last bit of the dtype in what it is given is more than one step of e4m3.
            is_exact = dtype == torch.float32
            assert (mine != other).float().mean() < (0.01 if is_exact else 0.25)
            most = 2**-8 if is_exact else 2**-7 * float(other.abs().max())
            torch.testing.assert_close(mine, other, rtol=0.13, atol=most)
        else:
            assert_close(mine, other, dtype)
    if normed:
        assert torch.equal(given.total, reference.total)


def by_the_rule(x, weight, bias, places):
    return multiply(x, weight, bias, places=places)


class TestOneRow:
    @pytest.mark.parametrize("heads", [(2, 1, 16), (1, 3, 8)])
    @pytest.mark.parametrize("block_n", [2, 4, 8])
    @pytest.mark.parametrize(("k", "block_k"), [(72, 128), (40, 16)])
    @pytest.mark.parametrize("normed", [False, True])
    def test_small_shapes(self, heads, block_n, k, block_k, normed, device):
        plan = OneRowPlan(block_n, block_k, 2, 0)

        def product(x, weight, bias, places):
            return one_row_product(x, weight, bias, "", plan, places=places)

        dtype = torch.float32 if INTERPRETED else BRAIN
        for is_narrow in (False, True):
            check(product, 1, heads, k, dtype, device, normed, not normed, is_narrow)


@pytest.mark.usefixtures("emulated")
class TestEmulated:
    """The warpgroup kernel on a CPU."""

    @pytest.fixture
    def emulated(self, monkeypatch):
        kernel = EmulatedKernel(kernel_module, "warpgroup_kernel")
        monkeypatch.setattr(kernel_module, "warpgroup_kernel", kernel)
        monkeypatch.setattr(kernel_module, "launch_options", lambda x: {"overlap": True})

    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize(
        ("rows", "plan"),
        [(40, WarpgroupPlan(64, 32, 1, 64, 3, 3)), (130, WarpgroupPlan(128, 16, 1, 128, 2, 2))],
    )
    @pytest.mark.parametrize("biased", [False, True])
    def test_small_shapes(self, heads, rows, plan, biased):
        def product(x, weight, bias, places):
            return warpgroup_product(x, weight, bias, "", plan, places)

        check(product, rows, heads, 192, BRAIN, "cpu", biased=biased, is_narrow=biased)


SMOLLM2 = DUMMY_SHAPES["smollm2-135m"]
QKV = (960, 576)


@compiles
@pytest.mark.parametrize(("rows", "types"), [(2, TYPES), (16, NARROW_TYPES), (32, TYPES)])
def test_resident_kernel_keeps_its_form(rows, types, tmp_path):
    """All weights come before the wait, and the next kernel starts after it."""
    plan = choose_plan(rows, *QKV, BRAIN, False, False, True)
    assert isinstance(plan, ResidentPlan)
    asm = compiled_resident(QKV[1], plan, normed=True, heads=(3, 3, 64), types=types)
    before, behind = asm["ptx"].split("griddepcontrol.wait")
    loads = re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", before)
    found = sum(int(count or 1) * int(bits) // 8 for count, bits in loads)
    assert found * 32 * plan.warps >= plan.block_n * QKV[1] * 2
    assert "griddepcontrol.launch_dependents" in behind
    assert "griddepcontrol.launch_dependents" not in before
    assert behind.count("bar.sync") <= 5, "rotating needs no meeting of the warps"
    assert spilled_bytes(asm, tmp_path) == 0


@compiles
@pytest.mark.parametrize(
    ("rows", "types"), [(64, TYPES), (128, NARROW_TYPES), (256, TYPES), (512, NARROW_TYPES)]
)
def test_warpgroup_kernel_keeps_its_form(rows, types, tmp_path):
    plan = choose_plan(rows, *QKV, BRAIN, False, False, True)
    assert isinstance(plan, WarpgroupPlan)
    kernel = compiled_warpgroup(plan, False, heads=(3, 3, 64), places=types)
    before, behind = kernel.asm["ptx"].split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in behind
    assert before.count("cp.async.bulk.tensor") >= plan.chunks
    last = behind.rindex("wgmma")
    assert "bar.sync" not in behind[last:], "rotating needs no meeting of the warps"
    assert spilled_bytes(kernel.asm, tmp_path) == 0


class TestBadInput:
    """A clear error on the host, before any kernel."""

    @pytest.fixture
    def arguments(self, device):
        places = places_of(1, 2, 32, torch.float32, device)
        weight = weight_of(192, 64, torch.float32, device)
        return {"x": random(1, 64, device=device), "weight": weight, "places": places}

    def run(self, arguments, **changed):
        places = arguments["places"]
        fields = {name: getattr(places, name) for name in places.__dataclass_fields__}
        places = QkvPlaces(**fields | changed)
        x, weight = arguments["x"], arguments["weight"]
        return one_row_product(x, weight, None, "", OneRowPlan(4, 64, 2, 0), places=places)

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("cos", lambda t: t[:, :16], r"\[positions, 32\]"),
            ("key_cache", lambda t: t[:-1], "the caches alike"),
            ("key_cache", lambda t: t[..., ::2], "KV heads x|contiguous"),
            ("position_ids", lambda t: t[:0], "1 rows, and positions of 0"),
            ("write_index", lambda t: t[:0], "places of 0"),
        ],
    )
    def test_tensors(self, arguments, name, change, message):
        with pytest.raises(ValueError, match=message):
            self.run(arguments, **{name: change(getattr(arguments["places"], name))})

    def test_dtype(self, arguments):
        caches = {
            name: getattr(arguments["places"], name).half() for name in ("key_cache", "value_cache")
        }
        with pytest.raises(ValueError, match="one dtype"):
            self.run(arguments, **caches)

    def test_plan(self, arguments):
        weight, places = arguments["weight"], arguments["places"]
        plan = OneRowPlan(64, 64, 2, 0)
        with pytest.raises(ValueError, match="must divide heads of 32"):
            one_row_product(arguments["x"], weight, None, "", plan, places=places)

    def test_no_plan(self, arguments):
        with pytest.raises(ValueError, match="does not serve rotate"):
            products.product_gpu(arguments["x"], arguments["weight"], places=arguments["places"])


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("rows", [1, 2, 8, 13, 16, 33, 40, 64, 65, 128, 200, 256, 512])
    @pytest.mark.parametrize("normed", [False, True])
    def test_by_the_rule(self, heads, rows, normed):
        kv_heads, group, dim = heads
        k = 576
        outputs = kv_heads * (group + 2) * dim
        x, weight = (
            random(rows, k, dtype=BRAIN, device="cuda"),
            weight_of(outputs, k, BRAIN, "cuda"),
        )
        assert products.choose_for(x, weight, rotate=dim, norm=normed).met.rotate
        check(by_the_rule, rows, heads, k, BRAIN, "cuda", normed, not normed, is_narrow=normed)

    @pytest.mark.parametrize("rows", [2, 8, 16])
    @pytest.mark.parametrize("block_n", [16, 32])
    @pytest.mark.parametrize("warps", [4, 8])
    def test_resident(self, rows, block_n, warps):
        plan = ResidentPlan(8 if rows <= 8 else 16, block_n, warps)

        def product(x, weight, bias, places):
            return resident_product(x, weight, bias, "", plan, places)

        for heads in HEADS:
            check(product, rows, heads, 576, BRAIN, "cuda", normed=True, biased=True)
