"""Products of FP8 with scales of blocks: emulated, compiled for a GPU, and on one."""

import subprocess

import pytest
import torch
import torch.nn.functional as F
import triton
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_async.ops.linear import streamed, streamed_fp8
from megatron_async.ops.linear.product_kernel import PROCESSORS, Problem, Wants
from megatron_async.ops.linear.products import WIDENED, WeightShape, choose
from megatron_async.ops.linear.quantised_weight import (
    BLOCK,
    Form,
    QuantisedWeight,
    quantise_rows,
)
from megatron_async.ops.linear.rounded_rows import RoundedRows, new_rounded, round_rows
from megatron_async.ops.linear.scaled_products import SCALED
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.linear.streamed import (
    HALVES_OF_FP8,
    MOST_PIECES,
    STRIPS_OF_FP8,
    StreamedPlan,
    chunks_per_share,
    warps_of,
)
from megatron_async.ops.linear.streamed_fp8 import (
    STREAMED_FP8,
    streamed_fp8_plan,
    streamed_fp8_product,
)
from tests.unit_tests.ops.linear.gluon_emulator import EmulatedKernel
from tests.unit_tests.ops.linear.test_products import BRAIN, assert_close, random
from tests.unit_tests.ops.linear.test_resident_kernel import HOPPER, TOOLS, spilled_bytes
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

CPU = torch.device("cpu")
FORMS = {
    "blocks": Form("FP8", BLOCK, BLOCK, rounds_rows=True),
    "rows of blocks": Form("FP8", 1, BLOCK, rounds_rows=True),
    "outputs": Form("FP8", 1, 0, rounds_rows=True),
}
PLANS = [
    (9, 130, 384, StreamedPlan((128,), 1, 1, 2, 16, warps=8)),  # warpgroups that share outputs
    (33, 200, 640, StreamedPlan((64, 32, 16), 1, 2, 2, 64, warps=8)),
    (1, 256, 256, StreamedPlan((64, 64), 1, 1, 2, 8)),  # tiles of one block each
    (5, 200, 640, StreamedPlan((32, 16), 1, 2, 2, 8)),  # ragged tile and chunk, several blocks
    (17, 130, 384, StreamedPlan((32, 32, 32, 16), 1, 1, 2, 32)),
    (64, 128, 256, StreamedPlan((64,), 1, 2, 2, 64)),
    (100, 70, 512, StreamedPlan((32, 32), 1, 1, 3, 128)),
    (70, 70, 384, StreamedPlan((64,), 1, 1, 2, 32, row_blocks=3)),
    (3, 200, 640, StreamedPlan((64,), 1, 2, 2, 8, warps=4, swaps=True)),  # ragged tile and chunk
    (20, 256, 384, StreamedPlan((128,), 1, 1, 2, 32, warps=8, swaps=True)),
]

LLAMA = [
    (6144, 4096, "", False),
    (4096, 4096, "", True),
    (28672, 4096, "swiglu", False),
    (4096, 14336, "", True),
]
"""Weights of Llama-3.1-8B: outputs, inputs, what follows, whether partial sums may."""


def plan_of(rows, outputs, k, activation, split, form="blocks"):
    problem = Problem(
        rows, outputs // 2 if activation == "swiglu" else outputs, k, BRAIN,
        activation == "swiglu", split, False, True, form=FORMS[form],
    )  # fmt: skip
    return streamed_fp8_plan(problem)


def weight_of(n, k, form, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(n, k, generator=generator).mul(20).to(torch.float8_e4m3fn)
    blocks = -(-k // form.inputs) if form.inputs else 1
    scales = torch.rand(-(-n // form.rows), blocks, generator=generator).add(0.2) / 20 / k**0.5
    return QuantisedWeight(codes.to(device), scales.to(device), form, BRAIN)


def expected_product(x, weight, bias=None, activation=""):
    exact = F.linear(weight.rounded(x).double(), weight.values().double())
    if bias is not None:
        exact += bias
    if activation == "swiglu":
        gate, up = exact.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.relu(exact).square() if activation else exact


def on_a_cpu(x, input_scale, multiple=1):
    """`round_rows` by its reference."""
    codes, scales = quantise_rows(x, input_scale)
    return RoundedRows(codes, scales.T.contiguous())


@pytest.fixture
def emulated(monkeypatch):
    kernel = EmulatedKernel(streamed, "streamed_kernel")
    monkeypatch.setattr(streamed, "streamed_kernel", kernel)
    monkeypatch.setattr(streamed, "launch_options", lambda x: {"overlap": True})
    monkeypatch.setattr(streamed_fp8, "round_rows", on_a_cpu)


@pytest.fixture(autouse=True)
def same_numbers(poisoned_memory):
    torch.manual_seed(0)


def check(rows, n, k, plan, form, activation, device):
    gated = activation == "swiglu"
    weight = weight_of(2 * n if gated else n, k, FORMS[form], device)
    x = random(rows, k + 24, dtype=BRAIN, device=device)[:, 8 : k + 8]
    found = streamed_fp8_product(x, weight, None, activation, plan)
    assert found.dtype == BRAIN
    assert_close(found, expected_product(x, weight, None, activation), BRAIN)
    assert torch.equal(found, streamed_fp8_product(x, weight, None, activation, plan))
    alone = streamed_fp8_product(x[:1], weight, None, activation, plan)
    assert torch.equal(found[:1], alone), "a row depends on the others"
    if not activation:
        bias = random(n, dtype=BRAIN, device=device)
        found = streamed_fp8_product(x, weight, bias, "", plan)
        assert_close(found, expected_product(x, weight, bias), BRAIN)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "n", "k", "plan"), PLANS)
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_emulated(rows, n, k, plan, form, activation, emulated):
    check(rows, n, k, plan, form, activation, "cpu")


def check_rounded(rows, k, plan, activation, has_scale, device):
    """Rows are those that a kernel of their own would round from the model's dtype."""
    weight = weight_of(256 * (2 if activation == "swiglu" else 1), k, FORMS["blocks"], device)
    x = random(rows, k, dtype=BRAIN, device=device)
    plain = streamed_fp8_product(x, weight, None, activation, plan)
    input_scale = torch.tensor(0.003, device=device) if has_scale else None
    rounded = new_rounded(rows, 256, torch.device(device), 4, input_scale)
    found = streamed_fp8_product(x, weight, None, activation, plan, rounded)
    assert found.shape == (rows, 256)
    codes, scales = quantise_rows(plain, input_scale)
    assert torch.equal(rounded.codes[:rows].float(), codes.float())
    assert torch.equal(rounded.scales[:, :rows].T, scales)
    behind = weight_of(64, 256, FORMS["outputs"], device)
    after = StreamedPlan((64,), 1, 1, 2, 8 if rows < 9 else 128)
    stream = Stream(found, rounded=rounded)
    found = streamed_fp8_product(stream, behind, None, "", after)
    assert found.dtype == BRAIN
    exact = F.linear(codes.double() * scales.repeat_interleave(128, 1), behind.values().double())
    assert_close(found, exact, BRAIN)


ROUNDED = [
    (3, 384, StreamedPlan((128,), 1, 1, 2, 8, warps=8, swaps=True), "swiglu", False),
    (20, 384, StreamedPlan((128,), 1, 1, 2, 32, warps=8, swaps=True), "", True),
    (33, 256, StreamedPlan((128,), 1, 1, 2, 64, warps=8), "swiglu", False),
    (70, 256, StreamedPlan((128,), 1, 1, 2, 64, warps=8, row_blocks=2), "squared_relu", False),
]


@pytest.mark.parametrize("case", ROUNDED)
def test_emulated_rounded_outputs(case, emulated):
    check_rounded(*case, "cpu")
    plan = StreamedPlan((64,), 1, 1, 2, 8)
    weight, rounded = weight_of(64, 256, FORMS["blocks"], "cpu"), new_rounded(1, 64, CPU, 1)
    with pytest.raises(ValueError, match=r"64 outputs by tiles of \(64,\) .* are not rounded"):
        streamed_fp8_product(random(1, 256, dtype=BRAIN), weight, None, "", plan, rounded)


def check_partial_sums(device):
    weight, x = weight_of(96, 896, FORMS["blocks"], device), random(3, 896, dtype=BRAIN)
    x = x.to(device)
    parts = streamed_fp8_product(x, weight, None, "", StreamedPlan((64,), 2, 2, 2, 8))
    assert parts.shape == (2, 3, 96)
    assert_close(parts.sum(0), expected_product(x, weight), BRAIN)


def test_emulated_partial_sums(emulated):
    check_partial_sums("cpu")


def test_a_scale_of_the_file_for_all_rows(emulated):
    weight = weight_of(64, 256, FORMS["outputs"], "cpu")
    weight = QuantisedWeight(
        weight.codes, weight.scales, weight.form, BRAIN, input_scale=torch.tensor(0.01)
    )
    x = random(3, 256, dtype=BRAIN)
    plan = StreamedPlan((64,), 1, 1, 2, 8)
    found = streamed_fp8_product(x, weight, None, "", plan)
    assert_close(found, expected_product(x, weight), BRAIN)
    assert not torch.allclose(found.double(), x.double() @ weight.values().double().T, rtol=0.05)


def compiled(rows, outputs, k, activation, split, form, rounds=False):
    plan, (scale_rows, inputs) = plan_of(rows, outputs, k, activation, split), FORMS[form][1:3]
    chunks, gated = chunks_per_share(k, plan, 128), activation == "swiglu"
    constants = {"chunks": chunks, "pieces": plan.pieces, "ring": min(plan.ring, chunks)}
    constants |= {"rounds": False, "gated": gated, "squared": False, "has_bias": False}
    constants |= {"overlap": True, "blocks": k // BLOCK, "one_block": inputs > 0}
    constants |= {"scale_rows": scale_rows if inputs else 0, "swaps": plan.swaps}
    if not rounds:
        constants |= {"rounded_scales": None, "rounded_stride": None, "like": None}
    constants |= {"input_scale": None}
    sizes = sorted(set(plan.pieces), reverse=True)
    sizes += sizes[-1:] * (MOST_PIECES - len(sizes))
    blocks = [([plan.strips, plan.block_m, 128], STRIPS_OF_FP8)]
    blocks += [([plan.strips, 2 if gated else 1, size, 128], HALVES_OF_FP8) for size in sizes]
    names = streamed.streamed_kernel.arg_names
    types = {
        name: f"tensordesc<fp8e4nv{block},{layout!r}>"
        for name, (block, layout) in zip(names, blocks, strict=False)
    }
    types |= dict.fromkeys(("rows", "n", "scale_stride", "rounded_stride"), "i32")
    types |= dict.fromkeys(("row_scales", "weight_scales", "rounded_scales"), "*fp32")
    types |= {"bias": "*fp8e4nv", "out": "*fp8e4nv" if rounds else "*bf16"}
    signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
    source = GluonASTSource(streamed.streamed_kernel, signature, constants, {})
    options = {"num_warps": plan.warps or warps_of(plan.block_m), "launch_pdl": True}
    return triton.compile(source, target=HOPPER, options=options), plan


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("rows", "weight", "form"), [(64, 2, "blocks"), (200, 1, "outputs"), (16, 2, "blocks")]
)
def test_compiled(rows, weight, form, tmp_path):
    """A product is waited for once: the compiler lets one run while the one before is promoted."""
    kernel, plan = compiled(rows, *LLAMA[weight], form, rounds=weight == 2)
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [TOOLS / "nvdisasm", "-c", tmp_path / "kernel.cubin"]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert code.count("WARPGROUP.DEPBAR") == len(plan.pieces) * plan.strips
    assert kernel.metadata.shared <= 227 * 1024
    assert spilled_bytes(kernel.asm, tmp_path) == 0


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(("rows", "n", "k", "plan"), PLANS)
    @pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
    def test_small_shapes(self, rows, n, k, plan, form, activation):
        check(rows, n, k, plan, form, activation, "cuda")

    @pytest.mark.parametrize("case", ROUNDED)
    def test_rounded_outputs(self, case):
        check_rounded(*case, "cuda")

    def test_partial_sums(self):
        check_partial_sums("cuda")

    @pytest.mark.parametrize(("rows", "k"), [(1, 128), (7, 1152), (64, 4096), (130, 14336)])
    def test_rows_are_rounded_as_by_the_reference(self, rows, k):
        x = random(rows, k + 8, dtype=BRAIN, device="cuda")[:, 8:]
        x[0, :BLOCK] = 0
        for scale in (None, torch.tensor(0.003, device="cuda")):
            codes, scales = quantise_rows(x, scale)
            found = round_rows(x, scale)
            assert torch.equal(found.scales[:, :rows].T, scales)
            assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))

    @pytest.mark.parametrize("rows", [1, 16, 33, 64, 128, 200])
    @pytest.mark.parametrize(("outputs", "k", "activation", "split"), LLAMA)
    def test_llama(self, rows, outputs, k, activation, split):
        if (plan := plan_of(rows, outputs, k, activation, split)) is None:
            pytest.skip("cuBLASLt's")
        weight = weight_of(outputs, k, FORMS["blocks"], "cuda")
        x = random(rows, k, dtype=BRAIN, device="cuda")
        found = streamed_fp8_product(x, weight, None, activation, plan)
        whole = found if found.dim() == 2 else found.sum(0)
        assert_close(whole, expected_product(x, weight, None, activation), BRAIN)


def test_which_products_are_streamed():
    for outputs, k, activation, split in LLAMA:
        for rows in (1, 16, 64, 128, 256):
            wants = Wants(rows, norm=True, activation=activation, split=split)
            shape = WeightShape(outputs, k, BRAIN, form=FORMS["blocks"])
            kernel, plan, met = choose(shape, wants._replace(rounded=bool(activation)))
            assert met.rounded == bool(activation)
            met = met._replace(rounded=False)
            if (rows > 64 and activation) or (rows > 128 and not split):
                assert kernel is SCALED
                continue
            assert kernel is STREAMED_FP8
            assert met == wants
            height = sum(plan.pieces)
            halves = 2 if activation else 1
            assert rows <= plan.block_m * plan.row_blocks
            programs = -(-outputs // halves // height) * plan.splits * plan.row_blocks
            assert programs <= PROCESSORS
            chunk = (plan.block_m + height * halves) * 128 * plan.strips
            assert chunk * plan.ring <= 227 * 1024
    for form in (Form("FP8", BLOCK, BLOCK), Form("FP8", 1, 64, rounds_rows=True)):
        assert choose(shape._replace(form=form), Wants(1)).kernel not in (STREAMED_FP8, SCALED)
    assert choose(shape._replace(k=4160), Wants(1)).kernel is not STREAMED_FP8
    assert choose(shape._replace(dtype=torch.float32), Wants(1)).kernel is WIDENED
