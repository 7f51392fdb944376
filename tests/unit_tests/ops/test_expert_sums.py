"""Sums of what experts say of a token, alone and with the norm behind them."""

import pytest
import torch
from triton_interpreter import EXACT_16_BIT

from megatron_async.ops.expert_routing import NO_EXPERT
from megatron_async.ops.expert_sums import (
    ExpertOutputs,
    sum_experts,
    sum_experts_add_rms_norm,
    sum_experts_add_rms_norm_reference,
    sum_experts_reference,
)
from megatron_async.ops.rms_norm import add_rms_norm

pytestmark = pytest.mark.usefixtures("poisoned_memory")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
EPS = 1e-5


def make_outputs(tokens, hidden, topk, dtype, device):
    """Experts 2 to 4 of 8 are here; rows of the others are no numbers, nor are their neighbours'
    routing."""
    packed = torch.randint(NO_EXPERT, 8, (tokens, topk + 2), device=device, dtype=torch.int32)
    experts = packed[:, :topk]
    rows = torch.randn(tokens * topk, hidden, device=device).to(dtype)
    rows[((experts < 2) | (experts > 4)).flatten()] = torch.nan
    return ExpertOutputs(rows, experts, 2, 3, dtype)


def written_out(outputs):
    """Every token by itself, in float32, rounded once."""
    sums = torch.zeros(outputs.shape)
    for pair, expert in enumerate(outputs.experts.flatten().tolist()):
        if 2 <= expert <= 4:
            sums[pair // outputs.experts.size(1)] += outputs.rows[pair].float().cpu()
    return sums.to(outputs.dtype)


def check(tokens, hidden, topk, dtype, device):
    outputs = make_outputs(tokens, hidden, topk, dtype, device)
    sums = sum_experts(outputs)
    assert torch.equal(sums.cpu(), written_out(outputs))
    residual = torch.randn(tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    weight = torch.linspace(0.5, 2, hidden, device=device).to(dtype)
    normed, total = sum_experts_add_rms_norm(outputs, residual, weight, EPS)
    # The same bits as in two kernels.
    expected = add_rms_norm(sums, residual, weight, EPS)
    assert torch.equal(total, expected[1])
    assert torch.equal(normed, expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, *EXACT_16_BIT])
@pytest.mark.parametrize(("tokens", "hidden", "topk"), [(1, 40, 1), (5, 1040, 3), (0, 16, 2)])
def test_sums_of_what_is_here(tokens, hidden, topk, dtype, device):
    check(tokens, hidden, topk, dtype, device)


def test_references():
    outputs = make_outputs(6, 16, 4, torch.float32, "cpu")
    sums = sum_experts_reference(outputs)
    torch.testing.assert_close(sums, written_out(outputs))
    residual, weight = torch.randn(6, 16), torch.randn(16)
    _, total = sum_experts_add_rms_norm_reference(outputs, residual, weight, EPS)
    assert torch.equal(total, residual + sums)


def test_bad_input():
    rows, experts = torch.zeros(6, 8), torch.zeros(3, 2, dtype=torch.int32)
    good = ExpertOutputs(rows, experts, 0, 1, torch.float32)
    for bad, message in (
        (ExpertOutputs(rows[:5], experts, 0, 1, torch.float32), r"\[3 \* 2, hidden\]"),
        (ExpertOutputs(rows, experts, 0, 1, torch.float16), "rows must be torch.float16"),
        (ExpertOutputs(torch.zeros(32, 8), torch.zeros(1, 32), 0, 1, torch.float32), "found 32"),
    ):
        with pytest.raises(ValueError, match=message):
            sum_experts(bad)
    with pytest.raises(ValueError, match=r"residual must be like them and weight \(8,\)"):
        sum_experts_add_rms_norm(good, rows, torch.zeros(8), EPS)
    with pytest.raises(ValueError, match="with adjacent elements"):
        sum_experts_add_rms_norm(good, rows[:3].half(), torch.zeros(8), EPS)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "hidden"), [(2, 512), (64, 2048), (300, 4096), (3, 5120)])
def test_real_sizes(tokens, hidden, dtype):
    for topk in (2, 8, 22):
        check(tokens, hidden, topk, dtype, "cuda")
