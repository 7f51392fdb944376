"""Fused SwiGLU against torch."""

import pytest
import torch
import torch.nn.functional as F

from megatron_async.ops.linear.swiglu import swiglu, swiglu_gpu
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT, assert_rounded_alike

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(tokens, ffn, dtype, device, stride=0):
    x = (4 * torch.randn(tokens, 2 * ffn + stride, device=device)).to(dtype)[:, : 2 * ffn]
    out = swiglu_gpu(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, swiglu.reference(x))
    if dtype in EXACT_16_BIT:
        assert_rounded_alike(out, swiglu.reference(x))
    # Megatron's unfused path: silu rounded to the dtype, then the product.
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(out, F.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "ffn"), [(1, 64), (3, 1), (5, 1536), (2, 1025), (0, 8)])
def test_equals_torch(tokens, ffn, dtype, device):
    check(tokens, ffn, dtype, device)
    check(tokens, ffn, dtype, device, stride=5)


def test_large_gates_do_not_overflow(device):
    x = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 2.0, 3.0]], device=device)
    assert swiglu_gpu(x).tolist() == [[0.0, 0.0, 400.0, 3e4]]


@pytest.mark.parametrize("x", [torch.ones(2, 7), torch.ones(8, 2).t()])
def test_bad_input(x):
    with pytest.raises(ValueError, match=r"rows must be \[gate; up\]"):
        swiglu_gpu(x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "ffn"), [(1, 14336), (67, 1536), (2048, 14336)])
def test_real_sizes(tokens, ffn, dtype):
    check(tokens, ffn, dtype, "cuda")


@pytest.mark.gpu
def test_replays_in_a_graph():
    x = torch.randn(16, 2 * 1536, device="cuda").to(torch.bfloat16)
    swiglu_gpu(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = swiglu_gpu(x)
    for _ in range(3):
        x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out, swiglu.reference(x))
