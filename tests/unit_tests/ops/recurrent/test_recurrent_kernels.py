"""The kernels of Mamba-2 and Gated DeltaNet against a plain recurrence in float64: small layers in
the interpreter."""

from typing import NamedTuple

import pytest
import torch

from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.recurrent import delta_prefill
from megatron_async.ops.recurrent.delta_pools import DeltaShape
from megatron_async.ops.recurrent.gated_norms import gated_rms_norm
from megatron_async.ops.recurrent.mamba_pools import MambaShape, check_gating, make_gating
from megatron_async.ops.recurrent.recurrent_pools import FlushRule
from tests.unit_tests.ops.recurrent import recurrent_checks as checks
from tests.unit_tests.ops.recurrent.recurrent_layers import (
    KERNELS,
    REFERENCES,
    DeltaLayer,
    MambaLayer,
)
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SIXTEEN_BITS = torch.float16 if INTERPRETED else torch.bfloat16
"""Triton's interpreter truncates to bfloat16 where a GPU rounds."""
MAMBA_SHAPES = {
    "nemotron-3-nano": {"heads": 64, "head_dim": 64, "groups": 8, "d_state": 128},
    "nemotron-nano-9b-v2": {"heads": 128, "head_dim": 80, "groups": 8, "d_state": 128},
    "granite-4.0-h-350m": {"heads": 48, "head_dim": 32, "groups": 1, "d_state": 128},
    "bamba-9b": {"heads": 128, "head_dim": 64, "groups": 1, "d_state": 128},
    "wide heads": {"heads": 16, "head_dim": 128, "groups": 4, "d_state": 64},
    "wide state": {"heads": 24, "head_dim": 128, "groups": 1, "d_state": 256},
}
DELTA_SHAPES = {
    "qwen3-next-80b": {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
    "qwen3.5, 48 heads": {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128},
    "qwen3.5 on 8 ranks": {"key_heads": 2, "value_heads": 8, "key_dim": 128, "value_dim": 128},
    "no groups": {"key_heads": 6, "value_heads": 6, "key_dim": 64, "value_dim": 80},
    "small keys": {"key_heads": 4, "value_heads": 8, "key_dim": 16, "value_dim": 32},
    "wide keys": {"key_heads": 4, "value_heads": 8, "key_dim": 256, "value_dim": 256},
}


class Steps(NamedTuple):
    """Steps that checks take in the interpreter; a step of Gated DeltaNet takes it longer."""

    flushes: int
    bfloat16: int
    packed: int
    widths: int
    widest: int
    taken_back: int
    snapshots: int
    odd: int
    odd_split: int


class Recurrence(NamedTuple):
    """A kind of layer, as these tests have it."""

    layer: type
    small: dict
    odd: dict
    """A head's dimension, or a value, is more than a tile of lanes, and no multiple of one; three
    value heads share a key."""
    steps: Steps
    saves: tuple
    odd_splits: tuple
    """In the interpreter."""

    def of(self, dtype, device, **sizes):
        return self.layer(**(self.small | sizes), dtype=dtype, device=device)


KINDS = {
    "mamba": Recurrence(
        MambaLayer,
        {"heads": 2},
        {"heads": 3, "groups": 1, "head_dim": 20},
        Steps(45, 8, 6, 8, 3, 14, 3, 4, 6),
        ((28, 32), (32, 32)),
        ((5, 2, 6), (63, 2, 1, 66)),
    ),
    "delta": Recurrence(
        DeltaLayer,
        {"key_heads": 1, "value_heads": 2},
        {"value_heads": 3, "value_dim": 48},
        Steps(20, 5, 3, 3, 2, 8, 2, 1, 1),
        ((28, 32),),
        ((5, 2, 6),),
    ),
}
ON_GPU = Steps(45, 20, 6, 14, 5, 40, 3, 4, 6)


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def steps(kind):
    return kind.steps if INTERPRETED else ON_GPU


@pytest.fixture(params=["16 bits"] if INTERPRETED else ["float32", "16 bits"])
def layer(request, kind, device):
    dtype = torch.float32 if request.param == "float32" else SIXTEEN_BITS
    return kind.of(dtype, device)


@pytest.fixture
def exact_layer(kind, device):
    return kind.of(torch.float32, device)


@pytest.fixture
def kernels(kind):
    return KERNELS[kind.layer.kind]


@pytest.fixture
def references(kind):
    return REFERENCES[kind.layer.kind]


def test_odd_sizes(kind, kernels, steps, device):
    layer = kind.of(torch.float32, device, **kind.odd)
    checks.check_packed(layer, kernels, steps.odd)
    checks.check_widths(layer, kernels, steps=steps.odd)
    all_splits = kind.odd_splits if INTERPRETED else ((5, 2, 6), (127, 2, 1, 129))
    for splits, count in zip(all_splits, (steps.odd_split, 2)):
        checks.check_split(layer, kernels, splits, count)


@pytest.mark.parametrize("splits", checks.FEW_SPLITS if INTERPRETED else checks.SPLITS)
def test_chunks_of_any_length_then_decode(layer, kernels, splits):
    checks.check_split(layer, kernels, splits, steps=6)


def test_decode_over_several_flushes(exact_layer, kernels, steps):
    checks.check_split(exact_layer, kernels, (5, 2, 6), steps.flushes)


@pytest.mark.parametrize(("period", "lag"), checks.FEW_RULES if INTERPRETED else checks.RULES)
def test_lag_and_period(period, lag, exact_layer, kernels):
    for splits in ((130, 3), (1,)):
        checks.check_split(exact_layer, kernels, splits, steps=12, rule=FlushRule(period, lag))


def test_longer_rings_do_as_well(exact_layer, kernels):
    checks.check_split(exact_layer, kernels, (5, 2, 6), steps=20, spare=15)


def test_bfloat16(kind, kernels, references, steps, device):
    layer = kind.of(torch.bfloat16, device)
    # The interpreter multiplies the bits of bfloat16 matrices as if they were integers.
    if INTERPRETED:
        kernels = kernels._replace(flush=references.flush, prefill=references.prefill)
    splits, tokens = ((20, 9), 40) if INTERPRETED else ((100, 29), 70)
    checks.check_split(layer, kernels, splits, steps.bfloat16)
    checks.check_split(layer, kernels, splits, steps.bfloat16, state_dtype=torch.bfloat16)
    checks.check_same_step_again(layer, kernels, 2, tokens, state_dtype=torch.bfloat16)


def test_state_is_float32(device):
    """Rounded to 16 bits, what tokens add makes 1e-4 of a difference in float16, bfloat16 1e-3."""
    layer = MambaLayer(heads=2, dtype=SIXTEEN_BITS, device=device)
    limit = 1e-5 if layer.dtype == torch.float16 else 3e-4
    checks.check_state_is_float32(layer, KERNELS["mamba"], REFERENCES["mamba"], limit)


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (MambaLayer, {"heads": 1, "groups": 1, "d_state": 256}),
        (DeltaLayer, {"key_heads": 1, "key_dim": 32, "value_heads": 1, "value_dim": 32}),
        (DeltaLayer, {"key_heads": 1, "key_dim": 256, "value_heads": 1, "value_dim": 32}),
    ],
)
def test_other_sizes_of_a_state(layer, sizes, device):
    layer = layer(**sizes, dtype=SIXTEEN_BITS, device=device)
    checks.check_split(layer, KERNELS[layer.kind], (65, 2, 70), steps=3)


def test_wide_lanes(device, monkeypatch):
    """Tiles that large layers and many chunks have; here with lanes behind the value's end."""
    monkeypatch.setattr(delta_prefill, "MANY_PROGRAMS", 1)
    layer = DeltaLayer(1, 16, 2, 48, dtype=SIXTEEN_BITS, device=device)
    assert delta_prefill.scan_tile(layer.dtype, layer.shape, 1).lanes == 32
    checks.check_split(layer, KERNELS["delta"], (127, 2, 1, 67), steps=3)


@pytest.mark.parametrize("shape", DELTA_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("chunks", [1, 16])
def test_warp_groups_have_two_stages(shape, dtype, chunks):
    """With one, Triton 3.6 lets 64 tokens' products read beyond the shared memory."""
    tile = delta_prefill.scan_tile(dtype, DeltaShape(**DELTA_SHAPES[shape]), chunks)
    assert tile.stages >= 2 or tile.tokens < 64


def test_packed_batch(layer, kernels, steps):
    checks.check_packed(layer, kernels, steps.packed)


def test_widths_with_rejected_drafts(layer, kernels, steps):
    checks.check_widths(layer, kernels, steps=steps.widths)
    checks.check_widths(layer, kernels, widths=(8,), steps=steps.widest)


def test_wide_rows_are_causal(layer, kernels):
    checks.check_wide_row_is_causal(layer, kernels)


def test_steps_taken_back(layer, kernels, steps):
    checks.check_taken_back(layer, kernels, steps=steps.taken_back)


@pytest.mark.parametrize("width", [1, 3])
def test_the_same_step_again(layer, kernels, width):
    checks.check_same_step_again(layer, kernels, width, tokens=28 if INTERPRETED else 70)


def test_slot_reuse(layer, kernels):
    checks.check_slot_reuse(layer, kernels, steps=4)


def test_row_at_its_limit(layer, kernels):
    checks.check_row_at_its_limit(layer, kernels)


def test_resumed_scan_is_bit_identical(layer, kernels):
    checks.check_resumed_scan(layer, kernels)


def test_snapshots(kind, layer, kernels, steps):
    checks.check_snapshots(layer, kernels, steps=steps.snapshots)
    cases = kind.saves if INTERPRETED else ((28, 32), (32, 32))
    checks.check_saves(layer, kernels, steps=steps.snapshots, cases=cases)


def test_repeated_tokens(device):
    for dtype in (SIXTEEN_BITS,) if INTERPRETED else (torch.float32, SIXTEEN_BITS):
        layer = KINDS["delta"].of(dtype, device)
        checks.check_equal_tokens(layer, KERNELS["delta"])


def gated(op, layer):
    """`op`, and its outputs gated, compared with gate and norm after it."""
    weight = torch.linspace(0.5, 2, layer.d_inner).to(layer.device, layer.dtype)
    sizes = layer.groups, layer.heads, layer.head_dim
    limit = 1e-5 if layer.dtype == torch.float32 else 2e-2

    def decode(zxbcdt, params, pools, step, rule, out=None):
        y = op(zxbcdt, params, pools, step, rule, out=out)
        rows = step.row_index.numel()
        gating = make_gating(weight, rows, *sizes)
        # A step run again gives the same bits.
        found = op(zxbcdt, params, pools, step, rule, gating=gating)
        gate = zxbcdt[:rows, : layer.d_inner]
        expected = gated_rms_norm.reference(y[:rows], gate, weight, layer.groups, 1e-5)
        divided = Stream(found, None, weight, 1e-5, gating.squares).divided()
        torch.testing.assert_close(divided, expected, rtol=limit, atol=limit)
        return y

    return decode


@pytest.mark.parametrize("head_dim", [16, 20])
def test_gated_outputs(head_dim, device):
    for dtype in (torch.float32, SIXTEEN_BITS):
        layer = MambaLayer(heads=4, groups=2, head_dim=head_dim, dtype=dtype, device=device)
        for ops in (KERNELS["mamba"], REFERENCES["mamba"]):
            both = REFERENCES["mamba"]._replace(decode=gated(ops.decode, layer))
            checks.check_packed(layer, both, steps=2)


def test_a_gating_that_does_not_fit(device):
    layer = MambaLayer(device=device)
    shape = MambaShape(4, 16, 2, 16)
    gating = make_gating(torch.ones(layer.d_inner, device=device), 3, 2, 4, 16)
    check_gating("op", gating, shape, 3, 1)
    for rows, width, message in ((3, 2, "2 query tokens"), (4, 1, r"\(4, 2, 2\)")):
        with pytest.raises(ValueError, match=message):
            check_gating("op", gating, shape, rows, width)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [*MAMBA_SHAPES, *DELTA_SHAPES])
def test_real_sizes(shape, dtype):
    kind = MambaLayer if shape in MAMBA_SHAPES else DeltaLayer
    layer = kind(**(MAMBA_SHAPES | DELTA_SHAPES)[shape], dtype=dtype, device="cuda")
    kernels = KERNELS[layer.kind]
    checks.check_packed(layer, kernels)
    checks.check_split(layer, kernels, (127, 2, 1, 129), steps=20)
    checks.check_widths(layer, kernels)
    checks.check_same_step_again(layer, kernels, 3)
    checks.check_resumed_scan(layer, kernels)
    checks.check_snapshots(layer, kernels)
    checks.check_saves(layer, kernels)
    if kind is DeltaLayer:
        checks.check_widths(layer, kernels, widths=(8,), steps=5)
        checks.check_equal_tokens(layer, kernels)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (MambaLayer, MAMBA_SHAPES["granite-4.0-h-350m"]),
        (DeltaLayer, DELTA_SHAPES["qwen3.5 on 8 ranks"]),
    ],
)
def test_replays_in_a_graph(layer, sizes):
    """A graph of a step serves any positions, lengths and rows that fit its shape."""
    layer = layer(**sizes, dtype=torch.bfloat16, device="cuda")
    checks.check_replays_in_a_graph(layer, KERNELS[layer.kind], REFERENCES[layer.kind])
