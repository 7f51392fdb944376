"""The Mamba-2 references against a plain recurrence in float64."""

import pytest
import torch

from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows
from tests.unit_tests.ops.recurrent import recurrent_checks as checks
from tests.unit_tests.ops.recurrent.mamba_cases import KERNELS, REFERENCES, Layer
from tests.unit_tests.ops.recurrent.recurrent_cases import Runner, Sequence, poisoned_pools

LAYERS = {
    "float32": Layer(),
    "one group": Layer(heads=3, groups=1, head_dim=20),
    "bfloat16": Layer(dtype=torch.bfloat16),
    "float16": Layer(heads=2, d_state=32, dtype=torch.float16),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


@pytest.mark.parametrize("splits", checks.SPLITS)
def test_chunks_of_any_length_then_decode(layer, splits):
    checks.check_split(layer, REFERENCES, splits)


@pytest.mark.parametrize("lag", [0, 2, 20])
def test_lag_and_period(lag):
    for period in (1, 8, 128):
        for splits in ((130, 3), (1,), (100, 29)):
            rule = FlushRule(period, lag)
            checks.check_split(LAYERS["float32"], REFERENCES, splits, rule=rule)


def test_longer_rings_do_as_well():
    checks.check_split(LAYERS["float32"], REFERENCES, (5, 2, 6), spare=15)


def test_state_in_bfloat16():
    layer = LAYERS["bfloat16"]
    checks.check_split(layer, REFERENCES, (100, 29), state_dtype=torch.bfloat16)
    checks.check_same_step_again(layer, REFERENCES, 2, state_dtype=torch.bfloat16)


def test_packed_batch(layer):
    checks.check_packed(layer, REFERENCES)


def test_widths_with_rejected_drafts(layer):
    checks.check_widths(layer, REFERENCES)
    checks.check_widths(layer, REFERENCES, widths=(8,))


def test_wide_rows_are_causal(layer):
    checks.check_wide_row_is_causal(layer, REFERENCES)


def test_steps_taken_back(layer):
    checks.check_taken_back(layer, REFERENCES)


@pytest.mark.parametrize("width", [1, 3])
def test_the_same_step_again(layer, width):
    checks.check_same_step_again(layer, REFERENCES, width)


def test_slot_reuse(layer):
    checks.check_slot_reuse(layer, REFERENCES)


def test_row_at_its_limit(layer):
    checks.check_row_at_its_limit(layer, REFERENCES)


def test_resumed_scan_is_bit_identical(layer):
    checks.check_resumed_scan(layer, REFERENCES)


def test_snapshots(layer):
    checks.check_snapshots(layer, REFERENCES)
    checks.check_saves(layer, REFERENCES)


def test_bad_input():
    layer = Layer()
    pools = poisoned_pools(layer, 3, 17, 4)
    rows = torch.zeros(2, dtype=torch.int64)
    bases = torch.zeros(2, dtype=torch.int32)
    prefill = PrefillRows(bases.new_zeros(3), bases, rows, rows, bases)

    def expect(message, inputs=4, width=1, rule=None, out=None, chunks=prefill, **changes):
        own = pools._replace(**{k: v for k, v in changes.items() if k in pools._fields})
        params = {k: v for k, v in changes.items() if k in layer.params._fields}
        params = layer.params._replace(**params)
        inputs = layer.inputs(inputs) if isinstance(inputs, int) else inputs
        arguments = (inputs, params, own)
        rule = rule or FlushRule()
        if chunks is prefill:
            positions = torch.zeros(2 * width, dtype=torch.int64)
            with pytest.raises(ValueError, match=message):
                decode(*arguments, rows, positions, bases, width, rule, out)
        if width == 1:
            with pytest.raises(ValueError, match=message):
                prefill_op(*arguments, chunks, bases, rule, out)

    decode, prefill_op = KERNELS.decode, KERNELS.prefill
    expect("found rows of 100", layer.inputs(4)[:, :100])
    expect("1 to 8 query tokens, not 9", width=9)
    expect("2 rows of 3 query tokens want 6 input rows", width=3)
    expect("make them 18 and 5 or more", rule=FlushRule(16, 1))
    expect("make them 19 and 5 or more", width=2)
    expect("pools do not fit", conv=pools.conv[:, :, 1:])
    expect("pools do not fit", ring_gates=pools.ring_gates[:2])
    expect("input's dtype", conv=pools.conv.half())
    expect("float32 or bfloat16", state=pools.state.half())
    expect("must be adjacent", state=pools.state.transpose(1, 2).contiguous().transpose(1, 2))
    expect("must be adjacent", layer.inputs(1).t().repeat(1, 4).t().t().contiguous().t())
    expect(r"conv_bias \(128,\)", conv_bias=torch.zeros(4))
    expect("parameters must be contiguous", a_log=torch.zeros(8)[::2])
    expect("out must be", out=torch.zeros(4, 3))
    expect("2 chunks want 3 starts", chunks=prefill._replace(starts=bases))
    with pytest.raises(ValueError, match="d_state 24 must be a power of two"):
        Runner(Layer(d_state=24), REFERENCES).prefill(Sequence(Layer(d_state=24), 3, 0), 3)
