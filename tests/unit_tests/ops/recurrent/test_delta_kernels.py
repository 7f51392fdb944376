"""The Gated DeltaNet kernels against a plain recurrence in float64: small layers in the
interpreter."""

import pytest
import torch

from megatron_async.ops.recurrent import delta_scan
from megatron_async.ops.recurrent.delta_pools import DeltaShape
from megatron_async.ops.recurrent.recurrent_pools import FlushRule
from tests.unit_tests.ops.recurrent import recurrent_checks as checks
from tests.unit_tests.ops.recurrent.delta_cases import KERNELS, REFERENCES, Layer
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SIXTEEN_BITS = torch.float16 if INTERPRETED else torch.bfloat16
"""Triton's interpreter truncates to bfloat16 where a GPU rounds."""
SHAPES = {
    "qwen3-next-80b": {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
    "qwen3.5, 48 heads": {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128},
    "qwen3.5 on 8 ranks": {"key_heads": 2, "value_heads": 8, "key_dim": 128, "value_dim": 128},
    "no groups": {"key_heads": 6, "value_heads": 6, "key_dim": 64, "value_dim": 80},
    "small keys": {"key_heads": 4, "value_heads": 8, "key_dim": 16, "value_dim": 32},
    "wide keys": {"key_heads": 4, "value_heads": 8, "key_dim": 256, "value_dim": 256},
}


@pytest.fixture(params=["16 bits"] if INTERPRETED else ["float32", "16 bits"])
def layer(request, device):
    dtype = torch.float32 if request.param == "float32" else SIXTEEN_BITS
    return Layer(key_heads=1, value_heads=2, dtype=dtype, device=device)


@pytest.fixture
def odd_layer(device):
    """A value is more than a tile of lanes, and no multiple of one; three share a key."""
    return Layer(key_heads=1, value_heads=3, value_dim=48, device=device)


def test_odd_sizes(odd_layer):
    steps = 1 if INTERPRETED else 4
    checks.check_packed(odd_layer, KERNELS, steps)
    checks.check_widths(odd_layer, KERNELS, steps=steps)
    checks.check_split(odd_layer, KERNELS, (5, 2, 6), steps)
    if not INTERPRETED:
        checks.check_split(odd_layer, KERNELS, (127, 2, 1, 129), steps=2)


@pytest.mark.parametrize("splits", checks.FEW_SPLITS if INTERPRETED else checks.SPLITS)
def test_chunks_of_any_length_then_decode(layer, splits):
    checks.check_split(layer, KERNELS, splits, steps=6)


def test_decode_over_several_flushes(device):
    layer = Layer(key_heads=1, value_heads=2, device=device)
    checks.check_split(layer, KERNELS, (5, 2, 6), steps=20 if INTERPRETED else 45)


@pytest.mark.parametrize(("period", "lag"), checks.FEW_RULES if INTERPRETED else checks.RULES)
def test_lag_and_period(period, lag, device):
    layer = Layer(key_heads=1, value_heads=2, device=device)
    for splits in ((130, 3), (1,)):
        checks.check_split(layer, KERNELS, splits, steps=12, rule=FlushRule(period, lag))


def test_longer_rings_do_as_well(device):
    layer = Layer(key_heads=1, value_heads=2, device=device)
    checks.check_split(layer, KERNELS, (5, 2, 6), steps=20, spare=15)


def test_bfloat16(device):
    layer = Layer(key_heads=1, value_heads=2, dtype=torch.bfloat16, device=device)
    # The interpreter multiplies the bits of bfloat16 matrices as if they were integers.
    ops = KERNELS
    if INTERPRETED:
        ops = KERNELS._replace(flush=REFERENCES.flush, prefill=REFERENCES.prefill)
    splits, steps = ((20, 9), 5) if INTERPRETED else ((100, 29), 20)
    checks.check_split(layer, ops, splits, steps)
    checks.check_split(layer, ops, splits, steps, state_dtype=torch.bfloat16)
    tokens = 40 if INTERPRETED else 70
    checks.check_same_step_again(layer, ops, 2, tokens, state_dtype=torch.bfloat16)


@pytest.mark.parametrize("key_dim", [32, 256])
def test_other_key_sizes(key_dim, device):
    layer = Layer(1, key_dim, 1, 32, dtype=SIXTEEN_BITS, device=device)
    checks.check_split(layer, KERNELS, (65, 2, 70), steps=3)


def test_wide_lanes(device, monkeypatch):
    """As large layers and many chunks have them; here with lanes behind the value's end."""
    monkeypatch.setattr(delta_scan, "MANY_PROGRAMS", 1)
    layer = Layer(key_heads=1, value_heads=2, value_dim=48, dtype=SIXTEEN_BITS, device=device)
    assert delta_scan.scan_tile(layer.dtype, layer.shape, 1).lanes == 32
    checks.check_split(layer, KERNELS, (127, 2, 1, 67), steps=3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("chunks", [1, 16])
def test_warp_groups_have_two_stages(shape, dtype, chunks):
    """With one, Triton 3.6 lets 64 tokens' products read beyond the shared memory."""
    tile = delta_scan.scan_tile(dtype, DeltaShape(**SHAPES[shape]), chunks)
    assert tile.stages >= 2 or tile.tokens < 64


def test_packed_batch(layer):
    checks.check_packed(layer, KERNELS, steps=3 if INTERPRETED else 6)


def test_widths_with_rejected_drafts(layer):
    checks.check_widths(layer, KERNELS, steps=3 if INTERPRETED else 14)
    checks.check_widths(layer, KERNELS, widths=(8,), steps=2 if INTERPRETED else 5)


def test_wide_rows_are_causal(layer):
    checks.check_wide_row_is_causal(layer, KERNELS)


def test_steps_taken_back(layer):
    checks.check_taken_back(layer, KERNELS, steps=8 if INTERPRETED else 40)


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
    checks.check_snapshots(layer, KERNELS, steps=2 if INTERPRETED else 3)
    cases = ((28, 32),) if INTERPRETED else ((28, 32), (32, 32))
    checks.check_saves(layer, KERNELS, steps=2 if INTERPRETED else 3, cases=cases)


def test_repeated_tokens(layer):
    checks.check_equal_tokens(layer, KERNELS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_real_sizes(shape, dtype):
    layer = Layer(**SHAPES[shape], dtype=dtype, device="cuda")
    checks.check_packed(layer, KERNELS)
    checks.check_split(layer, KERNELS, (127, 2, 1, 129), steps=20)
    checks.check_widths(layer, KERNELS)
    checks.check_widths(layer, KERNELS, widths=(8,), steps=5)
    checks.check_same_step_again(layer, KERNELS, 3)
    checks.check_resumed_scan(layer, KERNELS)
    checks.check_snapshots(layer, KERNELS)
    checks.check_saves(layer, KERNELS)
    checks.check_equal_tokens(layer, KERNELS)


@pytest.mark.gpu
def test_replays_in_a_graph():
    layer = Layer(**SHAPES["qwen3.5 on 8 ranks"], dtype=torch.bfloat16, device="cuda")
    checks.check_replays_in_a_graph(layer, KERNELS, REFERENCES)
