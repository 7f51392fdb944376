"""Products with 8-bit weights: how near to float32, and that a row depends on no other."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_async import LLM
from megatron_async.errors import ConfigurationError, OutOfMemoryError
from megatron_async.models.linear import pack_weights
from megatron_async.ops.linear import eight_bit
from megatron_async.ops.linear.eight_bit import EightBitWeight

HERE = eight_bit.ENGINE in torch.backends.quantized.supported_engines
pytestmark = pytest.mark.skipif(not HERE, reason="torch has no fbgemm here")


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def relative_error(found, expected):
    return (found - expected).norm() / expected.norm()


# Without VNNI sums of two products saturate at 16 bits, unless weights have 7 bits.
NEEDS_VNNI = pytest.mark.skipif(not eight_bit.has_vnni(), reason="the processor has no VNNI")


@pytest.mark.parametrize("vnni", [pytest.param(True, marks=NEEDS_VNNI), False])
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (3, 5)])
def test_near_float32(shape, vnni):
    """Rounding of weights is all that shows: rows, with an element that dwarfs the others, have 16
    bits."""
    weight, x = torch.randn(96, 200), torch.randn(*shape, 200)
    x[..., 3] = 60.0
    with mock.patch.object(eight_bit, "has_vnni", return_value=vnni):
        packed = EightBitWeight(weight)
    bias = torch.randn(96)
    found = packed.product(x, bias)
    assert found.shape == (*shape, 96)
    step = weight.abs().amax(1) / (127 if vnni else 63)
    rounded = (weight / step[:, None]).round() * step[:, None]
    assert relative_error(found, F.linear(x, rounded, bias)) < 2e-4
    assert 1e-3 < relative_error(found, F.linear(x, weight, bias)) < (0.01 if vnni else 0.02)


def test_a_row_depends_on_no_other():
    packed = EightBitWeight(torch.randn(64, 128))
    x = torch.randn(9, 128)
    x[4] *= 1e4
    together = packed.product(x)
    for row in range(9):
        assert torch.equal(packed.product(x[row : row + 1])[0], together[row])


def test_rows_that_are_zero_or_not_finite_stay_alone():
    packed = EightBitWeight(torch.randn(64, 128))
    x = torch.randn(4, 128)
    x[0], x[1, 5], x[2, 7] = 0.0, torch.nan, torch.inf
    found = packed.product(x)
    assert found[0].eq(0).all()
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()
    assert found[3].isfinite().all()


def test_sums_do_not_saturate_without_vnni():
    """The largest rows and weights that there are; fbgemm would cut 2 x 255 x 127 off at 32,767."""
    with mock.patch.object(eight_bit, "has_vnni", return_value=False):
        packed = EightBitWeight(torch.ones(16, 64))
    assert packed.product(torch.ones(1, 64)).sub(64).abs().max() < 1e-3
    assert 2 * 255 * eight_bit.LARGEST_WITHOUT_VNNI <= 2**15 - 1


def test_the_engine_of_torch_is_left_alone():
    before = torch.backends.quantized.engine
    EightBitWeight(torch.ones(2, 16))
    assert torch.backends.quantized.engine == before


def test_refused():
    with pytest.raises(ConfigurationError, match=r"'int4' is unknown: use one of int8"):
        LLM("dummy:tiny", device="cpu", quantization="int4")
    with pytest.raises(ConfigurationError, match=r"not for torch\.bfloat16 on cpu"):
        LLM("dummy:tiny", device="cpu", dtype="bfloat16", quantization="int8")
    with LLM("dummy:tiny", device="cpu") as llm:
        model = llm.engine.controller.inference_wrapped_model.model
        with pytest.raises(OutOfMemoryError, match=r"quantization='int8' keeps 0\.\d+ GiB"):
            pack_weights(model, 1000, "int8")
    with (
        mock.patch.object(eight_bit, "ENGINE", "none"),
        pytest.raises(ConfigurationError, match="needs torch's none kernels"),
    ):
        LLM("dummy:tiny", device="cpu", quantization="int8")
