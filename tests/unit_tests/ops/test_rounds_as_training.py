"""What keeps the promise "invariant" rounds where Megatron-Core's training does: against its own
functions, to the bit where no sums are in between."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu as their_squared_relu
from megatron.core.fusions.fused_bias_swiglu import swiglu as their_swiglu
from megatron.core.fusions.fused_bias_swiglu import weighted_swiglu
from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megatron_async.ops.attention import rope_append as rope_file
from megatron_async.ops.attention.rope_append import rope_append, rope_append_gpu
from megatron_async.ops.experts import shared_gate
from megatron_async.ops.experts.expert_mlp import expert_mlp
from megatron_async.ops.experts.expert_routing import Routing
from megatron_async.ops.experts.shared_gate import add_shared_expert
from megatron_async.ops.linear.activations import squared_relu, swiglu
from tests.support.compiled_kernels import record
from tests.unit_tests.ops.attention.cases import rope_arguments
from tests.unit_tests.ops.cases import Numbers
from tests.unit_tests.ops.triton_interpreter import (
    EXACT_16_BIT,
    INTERPRETED,
    assert_rounded_alike,
)

INVARIANT = frozenset({"invariant"})
DTYPES = pytest.mark.parametrize("dtype", EXACT_16_BIT)


@pytest.fixture(autouse=True)
def eager():
    """Megatron's fused functions are compiled at their first call, for seconds. Fused they keep
    float32 up to their output: so they are given float32 here, and what they give is rounded."""
    with torch.compiler.set_stance("force_eager"):
        yield


def differing(found, expected):
    return float((found != expected).float().mean())


@DTYPES
@pytest.mark.parametrize("rotated", [64, 32])
@pytest.mark.parametrize("norm", [False, True])
def test_rope(norm, rotated, dtype, device):
    sizes = 40, 2, 3, 64, norm
    qkv, _, _, at, places, keys, values, *norms, _ = rope_arguments(Numbers(device, dtype), *sizes)
    angles = torch.outer(torch.arange(200, device=device), torch.rand(rotated // 2, device=device))
    angles = torch.cat((angles, angles), 1)
    cos, sin = angles.cos(), angles.sin()
    query = rope_append.on("gpu", INVARIANT)(qkv, cos, sin, at, places, keys, values, *norms)
    heads = qkv.view(40, 2, 5, 64)
    theirs = [heads[:, :, :3].reshape(40, 6, 64), heads[:, :, 3]]
    if norm:
        theirs = [F.rms_norm(x, (64,), norms[i], norms[2]) for i, x in enumerate(theirs)]
    theirs = [_apply_rotary_pos_emb_bshd(x, angles[at][:, None]) for x in theirs]
    ours = query, keys.flatten(0, 1)[places]
    for found, expected in zip(ours, theirs, strict=True):
        if norm:
            assert_rounded_alike(found, expected)
        else:
            assert torch.equal(found, expected)
    fast = rope_append_gpu(qkv, cos, sin, at, places, keys, values, *norms)
    assert differing(fast, theirs[0]) > 0.1, "the fast mode rounds once"


@DTYPES
@pytest.mark.parametrize("gated", [True, False])
def test_activations(gated, dtype, device):
    x = (3 * torch.randn(30, 256, device=device)).to(dtype)
    ours, theirs = (swiglu, their_swiglu) if gated else (squared_relu, their_squared_relu)
    found = ours.on("gpu", INVARIANT)(x)
    assert differing(found, theirs(x.float()).to(dtype)) <= 0.001


@DTYPES
@pytest.mark.parametrize("gated", [True, False])
def test_experts(gated, dtype, device, matrix_units):
    """Sums of another order change a rounding here and there; without those of training more than
    half of the outputs differ."""
    tokens, hidden, ffn, experts, topk = 48, 64, 48, 8, 3
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    fc1 = torch.randn(experts, (1 + gated) * ffn, hidden, device=device) / 4
    fc2 = torch.randn(experts, hidden, ffn, device=device) / 4
    fc1, fc2 = fc1.to(dtype), fc2.to(dtype)
    chosen = torch.rand(tokens, experts, device=device).topk(topk, 1).indices.to(torch.int32)
    routing = Routing(chosen, torch.rand(tokens, topk, device=device))
    expected = torch.zeros(tokens, hidden, device=device)
    activation = weighted_swiglu if gated else weighted_squared_relu
    for expert in range(experts):
        token, nth = (chosen == expert).nonzero(as_tuple=True)
        inner = (x[token].double() @ fc1[expert].double().t()).to(dtype)
        inner = activation(inner.float(), routing.weights[token, nth][:, None]).to(dtype)
        expected[token] += (inner.double() @ fc2[expert].double().t()).to(dtype).float()
    expected = expected.to(dtype)
    found = expert_mlp.on("gpu", INVARIANT)(x, routing, fc1, fc2, 0, experts)
    assert differing(found, expected) < 0.03
    assert differing(expert_mlp.on("gpu")(x, routing, fc1, fc2, 0, experts), expected) > 0.3


@DTYPES
def test_experts_are_added_in_the_order_of_their_numbers(dtype, device, matrix_units):
    x = torch.randn(20, 64, device=device).to(dtype)
    fc1 = torch.randn(3, 64, 64, device=device).to(dtype)
    fc2 = torch.randn(3, 64, 32, device=device).to(dtype)
    # Two that cancel, and what is left of one so small that its last bits do not fit beside them.
    small = 2.0 ** (-12 if dtype is torch.float16 else -17)
    fc1[2], fc2[2], fc2[0] = fc1[1], -fc2[1], fc2[0] * small
    ones, op = torch.ones(20, 3, device=device), expert_mlp.on("gpu", INVARIANT)

    def by(order, op=op):
        chosen = torch.tensor([order] * 20, dtype=torch.int32, device=device)
        return op(x, Routing(chosen, ones), fc1, fc2, 0, 3)

    first, second, third = (by([number, -1, -1]).float() for number in range(3))
    expected = (first + second + third).to(dtype)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        assert torch.equal(by(order), expected)
    assert differing(*(by(order, expert_mlp.on("gpu")) for order in ([0, 1, 2], [1, 2, 0]))) > 0.1


@DTYPES
def test_the_shared_expert(dtype, device):
    sums, shared, x = (torch.randn(50, 72, device=device).to(dtype) for _ in range(3))
    weight = (torch.randn(1, 72, device=device) / 72**0.5).to(dtype)
    found = add_shared_expert.on("gpu", INVARIANT)(sums, shared, x, weight)
    gate = torch.sigmoid((x.double() @ weight.double().t()).to(dtype))
    expected = sums + shared * gate
    assert_rounded_alike(found, expected)
    assert differing(add_shared_expert.on("gpu")(sums, shared, x, weight), expected) > 0.03


@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_a_compiler_leaves_the_roundings(monkeypatch):
    """Products of bfloat16 that are rounded to it are products *in* bfloat16 to the compiler, and
    with a sum behind them one operation of one rounding."""
    rope, gate = record(
        monkeypatch,
        (rope_file, "_rope_append_kernel"),
        (shared_gate, "_add_shared_expert_kernel"),
    )
    numbers = Numbers("cpu", torch.bfloat16)
    for norm in (False, True):
        rope_append.on("gpu", INVARIANT)(*rope_arguments(numbers, 2, 2, 3, 64, norm))
    rows = torch.zeros(2, 512, dtype=torch.bfloat16)
    add_shared_expert.on("gpu", INVARIANT)(rows, rows, rows, rows[:1])
    for launch in (*rope.launches, *gate.launches):
        assert "fma.rn.bf16" not in launch.compiled().asm["ptx"]
