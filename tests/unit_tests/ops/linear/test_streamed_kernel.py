"""The kernel whose weights arrive without a pause: emulated, compiled for a GPU, and on one."""

import re
import subprocess

import pytest
import torch
import triton
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_async.ops.linear import streamed
from megatron_async.ops.linear.activations import (
    squared_relu,
    squared_relu_gpu,
    swiglu,
    swiglu_gpu,
)
from megatron_async.ops.linear.product_kernel import PROCESSORS, Wants
from megatron_async.ops.linear.products import WeightShape, choose
from megatron_async.ops.linear.rms_norm import add_rms_norm_gpu
from megatron_async.ops.linear.streamed import (
    HALVES_OF_STRIPS,
    MOST_PIECES,
    STREAMED,
    STRIPS_IN_SHARED_MEMORY,
    StreamedPlan,
    chunks_per_share,
    streamed_product,
)
from megatron_async.ops.linear.warpgroup import WARPGROUP, WARPGROUP_INPUTS
from tests.unit_tests.ops.linear.gluon_emulator import EmulatedKernel
from tests.unit_tests.ops.linear.test_products import (
    BRAIN,
    assert_close,
    check_rows_alone,
    choose_plan,
    expected_product,
    random,
    weight_of,
)
from tests.unit_tests.ops.linear.test_resident_kernel import HOPPER, TOOLS, spilled_bytes
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

CASES = [
    (16, 64, 256, StreamedPlan((64,), 1, 1, 2, 16)),
    (64, 100, 576, StreamedPlan((32,), 1, 2, 3, 64)),  # a ragged tile and chunk
    (17, 90, 320, StreamedPlan((32, 16), 1, 1, 4, 32)),
    (1, 230, 192, StreamedPlan((64, 32, 16), 1, 1, 2, 8)),
    (40, 70, 64, StreamedPlan((8,), 1, 1, 8, 64)),  # a ring that is longer than the list
    (9, 40, 1088, StreamedPlan((16, 8), 1, 4, 2, 16)),
    (30, 150, 320, StreamedPlan((32, 16), 1, 2, 3, 32)),
    (5, 40, 1728, StreamedPlan((16,), 1, 8, 2, 8)),  # more products than a wait can leave running
    (128, 100, 192, StreamedPlan((32, 16), 1, 1, 3, 128)),
]
LLAMA = [
    (14336, 4096, "swiglu", StreamedPlan((64, 32, 16), 1, 1, 6, 64)),
    (14336, 4096, "swiglu", StreamedPlan((128,), 1, 1, 4, 128)),
    (14336, 4096, "swiglu", StreamedPlan((16,), 1, 4, 8, 16)),
    (4096, 14336, "", StreamedPlan((128,), 4, 1, 8, 64)),
    (4096, 14336, "", StreamedPlan((256,), 4, 1, 4, 128)),
]
"""More layouts for Llama-3.1-8B."""
CHOSEN = {
    (9, 16): [
        (14336, 4096, "swiglu", StreamedPlan((64, 32, 16), 1, 2, 3, 16)),
        (6144, 4096, "", StreamedPlan((32, 16), 1, 2, 13, 16)),
        (4096, 14336, "", StreamedPlan((64,), 2, 2, 10, 16)),
    ],
    (17, 32): [
        (14336, 4096, "swiglu", StreamedPlan((64, 32, 16), 1, 2, 3, 32)),
        (6144, 4096, "", StreamedPlan((32, 16), 1, 2, 10, 32)),
        (4096, 14336, "", StreamedPlan((64,), 2, 2, 9, 32)),
    ],
    (33, 64): [
        (14336, 4096, "swiglu", StreamedPlan((64, 32, 16), 1, 2, 3, 64)),
        (6144, 4096, "", StreamedPlan((32, 16), 1, 2, 7, 64)),
        (4096, 14336, "", StreamedPlan((64,), 2, 2, 6, 64)),
    ],
    (65, 128): [
        (14336, 4096, "swiglu", StreamedPlan((64, 32, 16), 1, 1, 5, 128)),
        (4096, 14336, "", StreamedPlan((128,), 4, 1, 7, 128)),
    ],
}
"""Layouts that the rule chooses, by the fewest and most rows."""
LLAMA += [layout for layouts in CHOSEN.values() for layout in layouts]
WEIGHTS = {
    "llama-3.1-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "qwen3-30b-a3b": [(5120, 2048), (2048, 4096)],
    "nemotron-3-nano": [(10304, 2688), (2688, 4096), (4608, 2688), (3712, 2688), (2688, 3712)],
    "qwen3-next": [(12352, 2048), (9216, 2048), (2048, 4096), (1024, 2048), (2048, 512)],
}
"""Outputs and inputs of products in one order that the kernel is chosen for."""
SPLIT_CASES = [(256, 2, 1, 32), (1024, 4, 2, 32), (192, 2, 1, 32), (320, 3, 1, 64)]


@pytest.fixture
def emulated(monkeypatch):
    kernel = EmulatedKernel(streamed, "streamed_kernel")
    monkeypatch.setattr(streamed, "streamed_kernel", kernel)
    monkeypatch.setattr(streamed, "launch_options", lambda x: {"overlap": True})


@pytest.fixture(autouse=True)
def same_numbers(poisoned_memory):
    torch.manual_seed(0)


def check_partial_sums(k, splits, strips, block_m, device):
    x, weight = random(19, k, dtype=BRAIN, device=device), weight_of(72, k, BRAIN, device)
    plan = StreamedPlan((32,), splits, strips, 3, block_m)
    parts = streamed_product(x, weight, None, "", plan)
    assert parts.shape == (splits, 19, 72)
    assert parts.dtype == torch.float32
    assert_close(parts.sum(0), expected_product(x, weight), BRAIN)


@pytest.mark.parametrize("dtype", [torch.float16, BRAIN])
@pytest.mark.parametrize(("rows", "n", "k", "plan"), CASES)
@pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
def test_emulated(rows, n, k, plan, activation, dtype, emulated):
    check_rows_alone(streamed_product, rows, n, k, plan, activation, dtype, "cpu")


@pytest.mark.parametrize(("k", "splits", "strips", "block_m"), SPLIT_CASES)
def test_emulated_partial_sums(k, splits, strips, block_m, emulated):
    check_partial_sums(k, splits, strips, block_m, "cpu")


def check_activation(n, k, plan, activation, device, act):
    """In one order an activation has the bits of its own kernel behind the rounded product."""
    weight = weight_of(2 * n if activation == "swiglu" else n, k, BRAIN, device)
    x = random(plan.block_m, k, dtype=BRAIN, device=device)
    halves = weight.chunk(2 if activation == "swiglu" else 1)
    expected = act(torch.cat([streamed_product(x, half, None, "", plan) for half in halves], 1))
    assert torch.equal(streamed_product(x, weight, None, activation, plan), expected)


@pytest.mark.parametrize(
    ("activation", "act"), [("swiglu", swiglu), ("squared_relu", squared_relu)]
)
def test_an_activation_of_the_rounded_product(activation, act, emulated):
    """Break it: compute the activation from the sums."""
    plan = StreamedPlan((32, 8), 1, 1, 3, 32, True)
    check_activation(90, 192, plan, activation, "cpu", act.reference)


BAD_CALLS = [
    (torch.ones(1, 64), torch.ones(4, 64), None, {}, "float32; the plan"),
    (torch.ones(3, 65).half()[:, :64], torch.ones(4, 64).half(), None, {}, "multiples of 16"),
    (torch.ones(1, 64).half(), torch.ones(4, 64).half(), torch.ones(4), {"splits": 2}, "neither"),
    (torch.ones(1, 64).half(), torch.ones(4, 64).half(), None, {"ring": 1}, "a ring at least 2"),
    (torch.ones(1, 64).half(), torch.ones(4, 64).half(), None, {"pieces": ()}, "1 to 3 sizes"),
    (torch.ones(1, 72).half(), torch.ones(4, 72).half(), None, {}, "whole strips"),
    (torch.ones(17, 64).half(), torch.ones(4, 64).half(), None, {}, "17 rows; the plan"),
]


@pytest.mark.parametrize(("x", "weight", "bias", "changes", "message"), BAD_CALLS)
def test_bad_input(x, weight, bias, changes, message):
    plan = {"pieces": (16,), "splits": 1, "strips": 1, "ring": 2, "block_m": 16}
    with pytest.raises(ValueError, match=message):
        streamed_product(x, weight, bias, "", StreamedPlan(**(plan | changes)))


def compiled(k, gated, plan):
    constants = {"chunks": chunks_per_share(k, plan), "pieces": plan.pieces, "rounds": plan.rounds}
    constants |= {"ring": plan.ring, "gated": gated, "squared": False}
    constants |= {"has_bias": False, "overlap": True}
    pieces = [*plan.pieces, *plan.pieces[-1:] * (MOST_PIECES - len(plan.pieces))]
    blocks = [([plan.strips, plan.block_m, 64], STRIPS_IN_SHARED_MEMORY)]
    blocks += [([plan.strips, 2 if gated else 1, p, 64], HALVES_OF_STRIPS) for p in pieces]
    names = streamed.streamed_kernel.arg_names
    types = {
        name: f"tensordesc<bf16{block},{layout!r}>"
        for name, (block, layout) in zip(names, blocks, strict=False)
    }
    types |= dict.fromkeys(("rows", "n"), "i32")
    constants |= dict.fromkeys(streamed.streamed_kernel.arg_names[8:15])  # of FP8
    constants |= {"blocks": 0, "scale_rows": 0, "one_block": False, "swaps": False}
    signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
    source = GluonASTSource(streamed.streamed_kernel, signature, constants, {})
    options = {"num_warps": max(4, plan.block_m // 16), "launch_pdl": True}
    return triton.compile(source, target=HOPPER, options=options)


def in_one_order(rows, outputs, k, dtype=BRAIN, aligned=True, **wants):
    weight = WeightShape(outputs, k, dtype, aligned=aligned)
    return choose(weight, Wants(rows, invariant=True, **wants))


ONE_ORDER = [
    (n, k, act, in_one_order(rows, n * (2 if act else 1), k, activation=act).plan)
    for n, k, act, rows in [
        (2048, 4096, "", 1),
        (2688, 4096, "", 16),
        (12352, 2048, "", 1),
        (14336, 4096, "swiglu", 64),
        (512, 2048, "swiglu", 1),
        (4096, 14336, "", 64),
    ]
]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("n", "k", "activation", "plan"), LLAMA + ONE_ORDER)
def test_compiled(n, k, activation, plan, tmp_path):
    kernel = compiled(k, activation == "swiglu", plan)
    copy = r"cp\.async\.bulk\.tensor"
    before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
    weights = len(plan.pieces)
    assert len(re.findall(copy, before)) == plan.ring * weights, "not all before the wait"
    goes_round = plan.ring < chunks_per_share(k, plan)
    assert len(re.findall(copy, after)) == plan.ring + (weights + 1) * goes_round
    running = min(weights * plan.strips, 7)
    # All warps have done with a place's products before one thread asks for the place again.
    assert re.search(rf"wgmma\.wait_group\.sync\.aligned {running};", after)
    done = after.split(f"wgmma.wait_group.sync.aligned {running};")[1]
    if goes_round:
        asks = re.search(copy, done).start()
        assert done.index("bar.sync") < done.index("mbarrier.arrive") < asks
        assert "wgmma" not in done[:asks]
    # The compiler of machine code lets none wait for the one before, as it does if a register of
    # theirs is used between them.
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [TOOLS / "nvdisasm", "-c", tmp_path / "kernel.cubin"]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert code.count("HGMMA") == 4 * plan.strips * weights
    assert code.count("WARPGROUP.DEPBAR") == 2
    assert kernel.metadata.shared <= 227 * 1024
    assert spilled_bytes(kernel.asm, tmp_path) == 0


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [torch.float16, BRAIN])
    @pytest.mark.parametrize(("rows", "n", "k", "plan"), CASES)
    @pytest.mark.parametrize("activation", ["", "swiglu", "squared_relu"])
    def test_small_shapes(self, rows, n, k, plan, activation, dtype):
        check_rows_alone(streamed_product, rows, n, k, plan, activation, dtype, "cuda")

    @pytest.mark.parametrize(("k", "splits", "strips", "block_m"), SPLIT_CASES)
    def test_partial_sums(self, k, splits, strips, block_m):
        check_partial_sums(k, splits, strips, block_m, "cuda")

    @pytest.mark.parametrize(("n", "k", "activation", "plan"), LLAMA)
    def test_llama(self, n, k, activation, plan):
        weight = weight_of(2 * n if activation else n, k, BRAIN, "cuda")
        x = random(plan.block_m, k, dtype=BRAIN, device="cuda")
        found = streamed_product(x, weight, None, activation, plan)
        whole = found if found.dim() == 2 else found.sum(0)
        assert_close(whole, expected_product(x, weight, activation=activation), BRAIN)

    @pytest.mark.parametrize(
        ("activation", "act"), [("swiglu", swiglu_gpu), ("squared_relu", squared_relu_gpu)]
    )
    def test_an_activation_of_the_rounded_product(self, activation, act):
        n = 3584 * (2 if activation == "swiglu" else 1)
        for rows in (8, 16, 64):
            choice = in_one_order(rows, n, 1152, activation=activation)
            check_activation(3584, 1152, choice.plan, activation, "cuda", act)

    @pytest.mark.parametrize("model", WEIGHTS)
    def test_plans_in_one_order(self, model):
        for outputs, k in WEIGHTS[model]:
            for rows in (1, 5, 16, 33, 64):
                kernel, plan, _ = in_one_order(rows, outputs, k)
                check_rows_alone(kernel.launch, rows, outputs, k, plan, "", BRAIN, "cuda")

    def test_a_chain_in_a_graph(self):
        """Products that start early, each reading what the one before wrote."""
        hidden, ffn, layers = 1024, 1792, 6
        up = [weight_of(2 * ffn, hidden, BRAIN, "cuda") for _ in range(layers)]
        down = [weight_of(hidden, ffn, BRAIN, "cuda") for _ in range(layers)]
        norm = torch.ones(hidden, dtype=BRAIN, device="cuda")
        start = random(16, hidden, dtype=BRAIN, device="cuda")
        wide = StreamedPlan((16,), 1, 2, 6, 16)
        split = StreamedPlan((64,), 4, 1, 6, 16)

        def chain():
            x, residual = start, torch.zeros_like(start)
            for fc1, fc2 in zip(up, down, strict=True):
                x, residual = add_rms_norm_gpu(x, residual, norm, 1e-5)
                x = streamed_product(x, fc1, None, "swiglu", wide)
                x = streamed_product(x, fc2, None, "", split)
            return add_rms_norm_gpu(x, residual, norm, 1e-5)[0]

        expected = chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        for _ in range(20):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)


def test_which_products_are_streamed() -> None:
    """Products of Llama-3.1-8B of 9 to 128 rows, which were measured, in those layouts."""

    def chosen(rows: int, outputs: int, k: int, activation: str, may_split: bool) -> StreamedPlan:
        plan = choose_plan(
            rows, outputs, k, torch.bfloat16, activation == "swiglu", may_split and not activation
        )
        return plan if isinstance(plan, StreamedPlan) else None

    for measured_rows, layouts in CHOSEN.items():
        measured = {layout[:3]: layout[3] for layout in layouts}
        if measured_rows[1] <= 64:
            measured[4096, 4096, ""] = measured[4096, 14336, ""]
        for (outputs, k, activation), plan in measured.items():
            for rows in measured_rows:
                assert chosen(rows, outputs, k, activation, outputs == 4096) == plan
            for rows in (1, 8, 129):
                assert chosen(rows, outputs, k, activation, outputs == 4096) is None
    assert chosen(64, 12288, 4096, "swiglu", False).pieces == (64, 32)
    for outputs, k, pieces in (
        (12352, 2048, (64, 32)),
        (9216, 2048, (64, 8)),
        (10304, 2688, (64, 16)),
    ):
        assert chosen(64, outputs, k, "", False).pieces == chosen(17, outputs, k, "", False).pieces
        assert chosen(64, outputs, k, "", False).pieces == pieces
        assert chosen(16, outputs, k, "", False) is None
    for other in (
        (2048, 8192, "", True),
        (128256, 4096, "", False),
        (4096, 4096, "", False),
        (28672, 8192, "swiglu", False),
        (8192, 8192, "", True),
        (6144, 2048, "", False),
    ):
        assert chosen(64, *other) is None, other
    for other in ((6144, 4096, "", False), (4096, 4096, "", True), (8192, 14336, "", True)):
        assert chosen(128, *other) is None, other


@pytest.mark.parametrize("rows", [1, 8, 9, 17, 64])
@pytest.mark.parametrize("model", WEIGHTS)
def test_plans_in_one_order(model, rows):
    """All programs run at once, and what is brought and summed fits."""
    for outputs, k in WEIGHTS[model]:
        for activation in ("", "swiglu"):
            kernel, plan, met = in_one_order(rows, outputs, k, activation=activation)
            if k <= WARPGROUP_INPUTS and rows > 16:
                assert kernel is WARPGROUP
                continue
            assert kernel is STREAMED
            assert met == Wants(rows, activation=activation, invariant=True)
            assert rows <= plan.block_m
            assert plan.splits == 1
            height, halves = sum(plan.pieces), 2 if activation else 1
            assert -(-outputs // halves // height) <= PROCESSORS
            assert 1 <= len(plan.pieces) <= MOST_PIECES
            assert 2 <= plan.ring <= -(-k // (plan.strips * 64))
            lines = plan.ring * plan.strips * (plan.block_m + height * halves)
            lines += max(64 - plan.block_m, 0)
            assert lines * 128 + 8 * plan.ring <= 227 * 1024
            assert 64 * height * halves // 128 <= 128, "sums that a thread holds"


def test_what_is_another_kernels():
    for other in ((1, 128256, 4096), (65, 4096, 4096), (1, 4096, 448), (1, 4096, 1000)):
        assert in_one_order(*other).kernel is not STREAMED
    assert in_one_order(1, 4096, 4096, aligned=False).kernel is not STREAMED
    assert in_one_order(1, 4096, 4096).kernel is STREAMED
    assert choose(WeightShape(4096, 4096, BRAIN), Wants(1)).kernel is not STREAMED
