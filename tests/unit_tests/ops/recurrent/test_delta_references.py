"""The Gated DeltaNet references against a plain recurrence in float64, and against transformers."""

import pytest
import torch

from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows
from tests.unit_tests.ops.recurrent import recurrent_checks as checks
from tests.unit_tests.ops.recurrent.delta_cases import KERNELS, REFERENCES, Layer
from tests.unit_tests.ops.recurrent.recurrent_cases import Decode, Runner, Sequence, poisoned_pools

LAYERS = {
    "float32": Layer(),
    "one key head": Layer(key_heads=1, value_heads=3, value_dim=48),
    "no groups": Layer(key_heads=3, value_heads=3, key_dim=32),
    "bfloat16": Layer(dtype=torch.bfloat16),
    "float16": Layer(key_heads=1, value_heads=2, key_dim=32, dtype=torch.float16),
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


def test_repeated_tokens(layer):
    checks.check_equal_tokens(layer, REFERENCES)


def test_float64():
    """What a CPU model of float64 runs through: nothing in between is narrower."""
    layer = Layer(dtype=torch.float64)
    runner = Runner(layer, REFERENCES, width=2, state_dtype=torch.float64)
    sequence = Sequence(layer, 200, row=1)
    runner.prefill(sequence, 130, 29)
    for _ in range(18):
        runner.step([Decode(sequence, right=2)])


def test_equals_transformers():
    """The truth that all checks use, and the reference, give what Qwen3-Next's classes do."""
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    layer = Layer(key_heads=2, key_dim=32, value_heads=6, value_dim=48)
    sequence = Sequence(layer, 150, row=0)
    runner = Runner(layer, REFERENCES)
    found = runner.prefill(sequence, 100, 50)
    arguments = [x.float()[None] for x in layer.heads(sequence.inputs)]
    q, k, v, beta, g = arguments
    for rule in (
        qwen3_next.torch_chunk_gated_delta_rule,
        qwen3_next.torch_recurrent_gated_delta_rule,
    ):
        outputs, state = rule(
            q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        runner.compare(outputs[0].flatten(1), sequence.expected)
        runner.compare(found, outputs[0].flatten(1))
        runner.compare(state[0].transpose(1, 2), sequence.states[-1])


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
                KERNELS.decode(*arguments, rows, positions, bases, width, rule, out)
        if width == 1:
            with pytest.raises(ValueError, match=message):
                KERNELS.prefill(*arguments, chunks, bases, rule, out)

    expect("input rows of 200; found rows of 100", layer.inputs(4)[:, :100])
    expect("0 key heads.*rows of no size", ring_xb=pools.ring_xb[:, :, :64])
    expect("1 to 8 query tokens, not 9", width=9)
    expect("2 rows of 3 query tokens want 6 input rows", width=3)
    expect("make them 18 and 5 or more", rule=FlushRule(16, 1))
    expect("make them 19 and 5 or more", width=2)
    expect("pools do not fit", conv=pools.conv[:, :, 1:])
    expect("pools do not fit", ring_gates=pools.ring_gates[:2])
    expect("input's dtype", conv=pools.conv.half())
    expect("float32 or bfloat16", state=pools.state.half())
    expect("must be adjacent", state=pools.state.transpose(1, 2).contiguous().transpose(1, 2))
    expect(r"dt_bias and a_log \(4,\)", dt_bias=torch.zeros(3))
    expect("parameters must be contiguous", a_log=torch.zeros(8)[::2])
    expect("out must be", out=torch.zeros(4, 3))
    expect("2 chunks want 3 starts", chunks=prefill._replace(starts=bases))
    for layer, message in (
        (Layer(key_dim=24), "key_dim 24 must be one of"),
        (Layer(key_dim=512), "key_dim 512 must be one of"),
        (Layer(value_dim=40), "value_dim 40 must be a multiple of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            Runner(layer, REFERENCES).prefill(Sequence(layer, 3, 0), 3)
