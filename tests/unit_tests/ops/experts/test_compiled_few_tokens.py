"""The products of a few tokens as Triton and ptxas compile them for a GPU, which needs none."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_async.ops.experts import expert_mlp, few_tokens
from megatron_async.ops.experts.expert_plan import (
    BY_HEIGHT,
    UP_REGISTERS,
    LayerShape,
    plan_few_tokens,
)
from megatron_async.ops.experts.expert_routing import Routing
from megatron_async.ops.experts.expert_sort import SortedPairs
from megatron_async.ops.experts.few_token_kernels import few_down_kernel, few_up_kernel
from megatron_async.ops.linear.activations import SWIGLU
from megatron_async.ops.linear.row_tiles import TILE_BYTES
from tests.support.compiled_kernels import record
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

HOPPER = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="compiles"),
    pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton has no cuobjdump"),
]
NANO = LayerShape(128, 6, 2688, 1856, 3712, False, 2)
QWEN3 = LayerShape(128, 8, 2048, 768, 0, True, 2)
TYPES = {
    "num_places": "i32",
    "dummy_place": "i32",
    "x_stride": "i32",
    "added_stride": "i32",
    "scale": "fp32",
    "places": "*i64",
}
TYPES |= dict.fromkeys(("logits", "bias", "out_weights", "weights"), "*fp32")
TYPES |= dict.fromkeys(("experts", "out_experts"), "*i32")
UNALIGNED = {"num_places", "dummy_place", "scale"}


def compiled(kernel, constants, options, folder):
    """Machine code, and bytes that are spilled."""
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        constant = name in constants
        signature[name] = "constexpr" if constant else TYPES.get(name, "*bf16")
        if not constant and name not in UNALIGNED:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": 4, "launch_pdl": True, **options}
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(triton.compile(source, target=HOPPER, options=options).asm["cubin"])
    usage, code = (
        subprocess.run([CUOBJDUMP, what, cubin], capture_output=True, text=True, check=True).stdout
        for what in ("-res-usage", "-sass")
    )
    return code, int(re.search(r"STACK:(\d+)", usage)[1])


def loads_before_products(code):
    """For each run of products: weights that were asked for since the run before."""
    found, waiting = [], 0
    for name in re.findall(r"(LDG\.E\.128\.STRONG|FFMA)", code):
        if name != "FFMA":
            waiting += 1
        elif waiting:
            found.append(waiting)
            waiting = 0
    return found


@pytest.mark.parametrize("shape", [NANO, QWEN3], ids=["shared", "gated"])
def test_all_weights_are_asked_for_before_the_first_product(shape, tmp_path):
    """ptxas kept 3 of 16 loads in front where nothing forbade it to move the others."""
    plan = plan_few_tokens(1, shape)
    same = {"tokens": 1, "topk": shape.topk, "width": shape.experts, "hidden": shape.hidden}
    same |= {"ffn": shape.ffn, "shared_ffn": shape.shared_ffn, "block_k": TILE_BYTES // 2}
    same |= {"overlap": True, "scales": None, "form": None}
    up = {"experts": shape.experts, "block_experts": 128, "block_n": plan.up_rows}
    up |= {"depth": plan.up_depth, "turns": plan.turns, "bias1": None}
    up["gating"] = SWIGLU if shape.gated else None
    up |= {"pre_softmax": False, "sigmoid": True, "has_bias": True, "has_places": True}
    code, spilled = compiled(few_up_kernel, same | up, {"maxnreg": UP_REGISTERS}, tmp_path)
    parts = 2 if shape.shared_ffn else 1
    assert loads_before_products(code) == [plan.up_depth * (1 + shape.gated)] * parts
    assert spilled == 0
    units = triton.next_power_of_2(shape.units)
    down = {"block_n": plan.down_rows, "depth": plan.down_depth, "units": units}
    down |= {"has_gate": False, "has_added": True}
    options = {"num_warps": plan.down_warps}
    code, spilled = compiled(few_down_kernel, same | down, options, tmp_path)
    each_warp = plan.down_rows * units // plan.down_warps
    assert loads_before_products(code) == [plan.down_depth * each_warp]
    assert spilled == 0


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_compile_with_biases_and_without(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument that is None can be given on, but be no variable, which the interpreter does not
    show."""
    kernels = (
        (expert_mlp, "grouped_product_kernel"), (expert_mlp, "combine_kernel"),
        (few_tokens, "few_up_kernel"), (few_tokens, "few_down_kernel"),
        (few_tokens, "norm_logits_kernel"),
    )  # fmt: skip
    recorders = record(monkeypatch, *kernels)
    pairs = SortedPairs(*(torch.zeros(99, dtype=torch.int32) for _ in range(3)))
    monkeypatch.setattr(expert_mlp, "sort_pairs", lambda *_: pairs)
    x, fc1, fc2 = (
        torch.zeros(shape, dtype=torch.bfloat16) for shape in ((1, 64), (4, 96, 64), (4, 64, 48))
    )
    biases = [torch.zeros(shape, dtype=x.dtype) for shape in ((4,), (4, 96), (4, 64))]
    logits, *more = biases if has_bias else (None, None, None)
    routing = Routing(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2))
    expert_mlp.expert_mlp_by_plan(x, routing, fc1, fc2, 0, BY_HEIGHT[16], False, *more)
    layer = few_tokens.ExpertLayer(x[:1].expand(4, 64).contiguous(), fc1, fc2, 2)
    layer = replace(layer, logit_bias=logits, bias1=more[0], bias2=more[1])
    plan = plan_few_tokens(1, layer.shape)
    few_tokens.few_token_experts_gpu(x, layer, plan)
    launches = [launch for recorder in recorders for launch in recorder.launches]
    assert len(launches) == 6
    for launch in launches:
        assert launch.compiled().asm["cubin"]
