"""The Mamba-2 kernels against a plain recurrence in float64: small layers in the interpreter."""

import pytest
import torch

from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.recurrent.gated_rms_norm import gated_rms_norm
from megatron_async.ops.recurrent.mamba_pools import MambaShape, check_gating, make_gating
from megatron_async.ops.recurrent.recurrent_pools import FlushRule
from tests.unit_tests.ops.recurrent import recurrent_checks as checks
from tests.unit_tests.ops.recurrent.mamba_cases import KERNELS, REFERENCES, Layer
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SIXTEEN_BITS = torch.float16 if INTERPRETED else torch.bfloat16
"""Triton's interpreter truncates to bfloat16 where a GPU rounds."""


@pytest.fixture(params=["16 bits"] if INTERPRETED else ["float32", "16 bits"])
def layer(request, device):
    dtype = torch.float32 if request.param == "float32" else SIXTEEN_BITS
    return Layer(heads=2, dtype=dtype, device=device)


@pytest.fixture
def odd_layer(device):
    """A head's dimension is more than a tile of lanes, and no multiple of one."""
    return Layer(heads=3, groups=1, head_dim=20, device=device)


def test_odd_sizes(odd_layer):
    checks.check_packed(odd_layer, KERNELS, steps=4)
    checks.check_widths(odd_layer, KERNELS, steps=4)
    checks.check_split(odd_layer, KERNELS, (5, 2, 6), steps=6)
    splits = (63, 2, 1, 66) if INTERPRETED else (127, 2, 1, 129)
    checks.check_split(odd_layer, KERNELS, splits, steps=2)


@pytest.mark.parametrize("splits", checks.FEW_SPLITS if INTERPRETED else checks.SPLITS)
def test_chunks_of_any_length_then_decode(layer, splits):
    checks.check_split(layer, KERNELS, splits, steps=6)


def test_decode_over_several_flushes(device):
    checks.check_split(Layer(heads=2, device=device), KERNELS, (5, 2, 6), steps=45)


@pytest.mark.parametrize(("period", "lag"), checks.FEW_RULES if INTERPRETED else checks.RULES)
def test_lag_and_period(period, lag, device):
    layer = Layer(heads=2, device=device)
    for splits in ((130, 3), (1,)):
        checks.check_split(layer, KERNELS, splits, steps=12, rule=FlushRule(period, lag))


def test_longer_rings_do_as_well(device):
    checks.check_split(Layer(heads=2, device=device), KERNELS, (5, 2, 6), steps=20, spare=15)


def test_bfloat16(device):
    layer = Layer(heads=2, dtype=torch.bfloat16, device=device)
    # The interpreter multiplies the bits of bfloat16 matrices as if they were integers.
    ops = KERNELS
    if INTERPRETED:
        ops = KERNELS._replace(flush=REFERENCES.flush, prefill=REFERENCES.prefill)
    splits, steps = ((20, 9), 8) if INTERPRETED else ((100, 29), 20)
    checks.check_split(layer, ops, splits, steps)
    checks.check_split(layer, ops, splits, steps, state_dtype=torch.bfloat16)
    tokens = 40 if INTERPRETED else 70
    checks.check_same_step_again(layer, ops, 2, tokens, state_dtype=torch.bfloat16)


def test_state_is_float32(device):
    """Rounded to 16 bits, what tokens add makes 1e-4 of a difference in float16, bfloat16 1e-3."""
    layer = Layer(heads=2, dtype=SIXTEEN_BITS, device=device)
    limit = 1e-5 if layer.dtype == torch.float16 else 3e-4
    checks.check_state_is_float32(layer, KERNELS, REFERENCES, limit)


def test_wide_state(device):
    layer = Layer(heads=1, groups=1, d_state=256, dtype=SIXTEEN_BITS, device=device)
    checks.check_split(layer, KERNELS, (65, 2, 70), steps=3)


def test_packed_batch(layer):
    checks.check_packed(layer, KERNELS, steps=6)


def test_widths_with_rejected_drafts(layer):
    checks.check_widths(layer, KERNELS, steps=8 if INTERPRETED else 14)
    checks.check_widths(layer, KERNELS, widths=(8,), steps=3 if INTERPRETED else 5)


def test_wide_rows_are_causal(layer):
    checks.check_wide_row_is_causal(layer, KERNELS)


def test_steps_taken_back(layer):
    checks.check_taken_back(layer, KERNELS, steps=14 if INTERPRETED else 40)


@pytest.mark.parametrize("width", [1, 3])
def test_the_same_step_again(layer, width):
    checks.check_same_step_again(layer, KERNELS, width, tokens=28 if INTERPRETED else 70)


def test_slot_reuse(layer):
    checks.check_slot_reuse(layer, KERNELS, steps=4)


def test_row_at_its_limit(layer):
    checks.check_row_at_its_limit(layer, KERNELS)


def test_resumed_scan_is_bit_identical(layer):
    checks.check_resumed_scan(layer, KERNELS)


def test_snapshots(layer):
    checks.check_snapshots(layer, KERNELS, steps=3)
    checks.check_saves(layer, KERNELS, steps=3, cases=((28, 32), (32, 32)))


def gated(op, layer):
    """`op`, and its outputs gated, compared with gate and norm after it."""
    weight = torch.linspace(0.5, 2, layer.d_inner).to(layer.device, layer.dtype)
    sizes = layer.groups, layer.heads, layer.head_dim
    limit = 1e-5 if layer.dtype == torch.float32 else 2e-2

    def decode(zxbcdt, params, pools, row_index, *step, out=None):
        y = op(zxbcdt, params, pools, row_index, *step, out=out)
        rows = row_index.numel()
        gating = make_gating(weight, rows, *sizes)
        # A step run again gives the same bits.
        found = op(zxbcdt, params, pools, row_index, *step, gating=gating)
        gate = zxbcdt[:rows, : layer.d_inner]
        expected = gated_rms_norm.reference(y[:rows], gate, weight, layer.groups, 1e-5)
        divided = Stream(found, None, weight, 1e-5, gating.squares).divided()
        torch.testing.assert_close(divided, expected, rtol=limit, atol=limit)
        return y

    return decode


@pytest.mark.parametrize("head_dim", [16, 20])
def test_gated_outputs(head_dim, device):
    for dtype in (torch.float32, SIXTEEN_BITS):
        layer = Layer(heads=4, groups=2, head_dim=head_dim, dtype=dtype, device=device)
        for decode in (KERNELS.decode, REFERENCES.decode):
            checks.check_packed(layer, REFERENCES._replace(decode=gated(decode, layer)), steps=2)


def test_a_gating_that_does_not_fit(device):
    layer = Layer(device=device)
    shape = MambaShape(4, 16, 2, 16)
    gating = make_gating(torch.ones(layer.d_inner, device=device), 3, 2, 4, 16)
    check_gating("op", gating, shape, 3, 1)
    for rows, width, message in ((3, 2, "2 query tokens"), (4, 1, r"\(4, 2, 2\)")):
        with pytest.raises(ValueError, match=message):
            check_gating("op", gating, shape, rows, width)


SHAPES = {
    "nemotron-3-nano": {"heads": 64, "head_dim": 64, "groups": 8, "d_state": 128},
    "nemotron-nano-9b-v2": {"heads": 128, "head_dim": 80, "groups": 8, "d_state": 128},
    "granite-4.0-h-350m": {"heads": 48, "head_dim": 32, "groups": 1, "d_state": 128},
    "bamba-9b": {"heads": 128, "head_dim": 64, "groups": 1, "d_state": 128},
    "wide heads": {"heads": 16, "head_dim": 128, "groups": 4, "d_state": 64},
    "wide state": {"heads": 24, "head_dim": 128, "groups": 1, "d_state": 256},
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_real_sizes(shape, dtype):
    layer = Layer(**SHAPES[shape], dtype=dtype, device="cuda")
    checks.check_packed(layer, KERNELS)
    checks.check_split(layer, KERNELS, (127, 2, 1, 129), steps=20)
    checks.check_widths(layer, KERNELS)
    checks.check_same_step_again(layer, KERNELS, 3)
    checks.check_resumed_scan(layer, KERNELS)
    checks.check_snapshots(layer, KERNELS)
    checks.check_saves(layer, KERNELS)


@pytest.mark.gpu
def test_replays_in_a_graph():
    """A graph of a step serves any positions, lengths and rows that fit its shape."""
    layer = Layer(**SHAPES["granite-4.0-h-350m"], dtype=torch.bfloat16, device="cuda")
    checks.check_replays_in_a_graph(layer, KERNELS, REFERENCES)
