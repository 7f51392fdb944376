"""Rows in FP8 against the reference: alone, and behind a norm."""

import pytest
import torch

from megatron_async.ops.linear.quantised_weight import BLOCK, quantise_rows
from megatron_async.ops.linear.rms_norm import add_rms_norm_gpu, add_rms_norm_rounded
from megatron_async.ops.linear.rounded_rows import RoundedRows, round_rows
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT, INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SCALES = [None, 0.003]


def check(found, rows, input_scale):
    codes, scales = quantise_rows(rows, input_scale)
    assert found.codes.is_contiguous()
    found = RoundedRows(found.codes[: len(rows)], found.scales)
    assert torch.equal(found.scales[:, : len(rows)].T, scales)
    if INTERPRETED:
        # Triton 3.6's interpreter halves what it rounds up to a power of two, and cuts off below
        # 2^-6.
        expected = codes.float()
        assert ((found.codes.float() - expected).abs() <= expected.abs() / 2 + 2**-9).all()
    else:
        assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))


def scale_on(device, scale):
    return None if scale is None else torch.tensor(scale, device=device)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("rows", "k", "multiple"), [(1, 128, 4), (7, 1152, 4), (5, 1280, 1)])
def test_rows(rows, k, multiple, scale, device):
    x = torch.randn(rows, k + 8, device=device).to(EXACT_16_BIT[-1])[:, 8:]
    x[0, :BLOCK] = 0
    x[-1, -1] = 3000  # beyond 448 times the scale of a file
    found = round_rows(x, scale_on(device, scale), multiple)
    assert found.scales.size(1) == len(found.codes) == -(-rows // multiple) * multiple
    check(found, x, scale_on(device, scale))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("parts", [0, 3])
def test_rows_behind_a_norm(parts, scale, device):
    dtype, shape = EXACT_16_BIT[-1], (6, 640)
    x = torch.randn(parts, *shape, device=device) if parts else None
    x = torch.randn(*shape, device=device).to(dtype) if x is None else x
    residual = torch.randn(*shape, device=device).to(dtype)
    weight = torch.rand(640, device=device).to(dtype)
    given = x, residual, weight, 1e-5
    found, total = add_rms_norm_rounded(*given, scale_on(device, scale), 4)
    normed, expected = add_rms_norm_gpu(*given)
    assert torch.equal(total, expected)
    check(found, normed, scale_on(device, scale))


def test_a_norm_of_no_whole_blocks():
    with pytest.raises(ValueError, match="200 elements are not blocks of 128"):
        add_rms_norm_rounded(torch.ones(2, 200), None, torch.ones(200), 1e-5, None, 4)
