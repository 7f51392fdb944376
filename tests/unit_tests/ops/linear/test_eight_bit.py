"""Products with 8-bit weights: how near to float32, and that a row depends on no other."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_async import LLM
from megatron_async.errors import ConfigurationError, OutOfMemoryError
from megatron_async.models import linear
from megatron_async.models.linear import pack_weights
from megatron_async.ops.cpu.compiler import multiplies_integers
from megatron_async.ops.linear.cpu import eight_bit
from megatron_async.ops.linear.cpu.eight_bit import EightBitWeight

HERE = eight_bit.ENGINE in torch.backends.quantized.supported_engines
pytestmark = pytest.mark.skipif(not HERE, reason="torch has no fbgemm here")


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def relative_error(found, expected):
    return (found - expected).norm() / expected.norm()


# Without VNNI sums of two products saturate at 16 bits, unless weights have 7 bits.
NEEDS_VNNI = pytest.mark.skipif(not eight_bit.has_vnni(), reason="the processor has no VNNI")
NEEDS_LOOPS = pytest.mark.skipif(not multiplies_integers(), reason="no Numba or no AVX2")
KINDS = [
    pytest.param("vnni", marks=NEEDS_VNNI),
    "no vnni",
    pytest.param("widened", marks=NEEDS_LOOPS),
]
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def pack(weight, kind):
    with (
        mock.patch.object(eight_bit, "has_vnni", return_value=kind == "vnni"),
        mock.patch.object(eight_bit, "multiplies_integers", return_value=kind == "widened"),
    ):
        return EightBitWeight(weight)


@of_each_kind
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (3, 5), (3, 4)])
def test_near_float32(shape, kind):
    """Rounding of weights is all that shows: rows, with an element that dwarfs the others, have 16
    bits."""
    weight, x = torch.randn(97, 200), torch.randn(*shape, 200)
    x[..., 3] = 60.0
    packed, steps = pack(weight, kind), 63 if kind == "no vnni" else 127
    bias = torch.randn(97)
    found = packed.product(x, bias)
    assert found.shape == (*shape, 97)
    step = weight.abs().amax(1) / steps
    rounded = (weight / step[:, None]).round() * step[:, None]
    assert relative_error(found, F.linear(x, rounded, bias)) < 2e-4
    assert 1e-3 < relative_error(found, F.linear(x, weight, bias)) < (0.02 if steps < 127 else 0.01)


@of_each_kind
def test_a_row_depends_on_no_other(kind):
    packed = pack(torch.randn(64, 128), kind)
    x = torch.randn(9, 128)
    x[4] *= 1e4
    together = packed.product(x)
    for row in range(9):
        assert torch.equal(packed.product(x[row : row + 1])[0], together[row])


@of_each_kind
def test_rows_that_are_zero_or_not_finite_stay_alone(kind):
    packed = pack(torch.randn(64, 128), kind)
    x = torch.randn(4, 128)
    x[0], x[1, 5], x[2, 7] = 0.0, torch.nan, torch.inf
    found = packed.product(x)
    assert found[0].eq(0).all()
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()
    assert found[3].isfinite().all()


@of_each_kind
@pytest.mark.parametrize("k", [64, 8200])
def test_sums_do_not_saturate(k, kind):
    """The largest rows and weights that there are; fbgemm would cut 2 x 255 x 127 off at 32,767,
    and 8,200 inputs of 16 bits are more than 32 bits hold."""
    packed = pack(torch.ones(16, k), kind)
    assert packed.product(torch.ones(1, k)).sub(k).abs().max() < 1e-3 * k / 64
    assert 2 * 255 * eight_bit.LARGEST_WITHOUT_VNNI <= 2**15 - 1


def test_the_engine_of_torch_is_left_alone():
    before = torch.backends.quantized.engine
    EightBitWeight(torch.ones(2, 16))
    assert torch.backends.quantized.engine == before


def has_eight_bits(**settings):
    with LLM("dummy:tiny", device="cpu", **settings) as llm:
        modules = llm.engine.controller.inference_wrapped_model.model.modules()
        return any(isinstance(getattr(m, "packed_weight", None), EightBitWeight) for m in modules)


@NEEDS_LOOPS
def test_auto_is_for_float32_where_loops_are_quick():
    assert has_eight_bits(quantization="auto")
    assert not has_eight_bits(quantization="auto", dtype="bfloat16")
    assert not has_eight_bits(quantization="none")
    with mock.patch.object(linear, "multiplies_integers", return_value=False):
        assert not has_eight_bits(quantization="auto")
    with LLM("dummy:tiny", device="cpu") as llm:
        model = llm.engine.controller.inference_wrapped_model.model
        assert pack_weights(model, 1000, "auto") == 0  # where int8 is refused, below


def test_refused():
    with pytest.raises(ConfigurationError, match=r"'int4' is unknown: use one of file, fp8, int8"):
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
