"""The references of Mamba-2 and Gated DeltaNet against a plain recurrence in float64, the latter
also against transformers."""

import pytest
import torch

from megatron_async.ops.recurrent.recurrent_pools import DecodeRows, FlushRule, PrefillRows
from tests.unit_tests.ops.recurrent import recurrent_checks as checks
from tests.unit_tests.ops.recurrent.recurrent_cases import Decode, Runner, Sequence, poisoned_pools
from tests.unit_tests.ops.recurrent.recurrent_layers import (
    KERNELS,
    REFERENCES,
    DeltaLayer,
    MambaLayer,
)

KINDS = {"mamba": MambaLayer, "delta": DeltaLayer}
LAYERS = {
    "mamba": MambaLayer(),
    "mamba, one group": MambaLayer(heads=3, groups=1, head_dim=20),
    "mamba, bfloat16": MambaLayer(dtype=torch.bfloat16),
    "mamba, float16": MambaLayer(heads=2, d_state=32, dtype=torch.float16),
    "delta": DeltaLayer(),
    "delta, one key head": DeltaLayer(key_heads=1, value_heads=3, value_dim=48),
    "delta, no groups": DeltaLayer(key_heads=3, value_heads=3, key_dim=32),
    "delta, bfloat16": DeltaLayer(dtype=torch.bfloat16),
    "delta, float16": DeltaLayer(key_heads=1, value_heads=2, key_dim=32, dtype=torch.float16),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


@pytest.mark.parametrize("splits", checks.SPLITS)
def test_chunks_of_any_length_then_decode(layer, splits):
    checks.check_split(layer, REFERENCES[layer.kind], splits)


@pytest.mark.parametrize("lag", [0, 2, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_lag_and_period(kind, lag):
    for period in (1, 8, 128):
        for splits in ((130, 3), (1,), (100, 29)):
            rule = FlushRule(period, lag)
            checks.check_split(KINDS[kind](), REFERENCES[kind], splits, rule=rule)


@pytest.mark.parametrize("kind", KINDS)
def test_longer_rings_do_as_well(kind):
    checks.check_split(KINDS[kind](), REFERENCES[kind], (5, 2, 6), spare=15)


@pytest.mark.parametrize("kind", KINDS)
def test_state_in_bfloat16(kind):
    layer = KINDS[kind](dtype=torch.bfloat16)
    checks.check_split(layer, REFERENCES[layer.kind], (100, 29), state_dtype=torch.bfloat16)
    checks.check_same_step_again(layer, REFERENCES[layer.kind], 2, state_dtype=torch.bfloat16)


def test_packed_batch(layer):
    checks.check_packed(layer, REFERENCES[layer.kind])


def test_widths_with_rejected_drafts(layer):
    checks.check_widths(layer, REFERENCES[layer.kind])
    checks.check_widths(layer, REFERENCES[layer.kind], widths=(8,))


def test_wide_rows_are_causal(layer):
    checks.check_wide_row_is_causal(layer, REFERENCES[layer.kind])


def test_steps_taken_back(layer):
    checks.check_taken_back(layer, REFERENCES[layer.kind])


@pytest.mark.parametrize("width", [1, 3])
def test_the_same_step_again(layer, width):
    checks.check_same_step_again(layer, REFERENCES[layer.kind], width)


def test_slot_reuse(layer):
    checks.check_slot_reuse(layer, REFERENCES[layer.kind])


def test_row_at_its_limit(layer):
    checks.check_row_at_its_limit(layer, REFERENCES[layer.kind])


def test_resumed_scan_is_bit_identical(layer):
    checks.check_resumed_scan(layer, REFERENCES[layer.kind])


def test_snapshots(layer):
    checks.check_snapshots(layer, REFERENCES[layer.kind])
    checks.check_saves(layer, REFERENCES[layer.kind])


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("delta")])
def test_repeated_tokens(name):
    checks.check_equal_tokens(LAYERS[name], REFERENCES["delta"])


def test_float64():
    """What a CPU model of float64 runs through: nothing in between is narrower."""
    layer = DeltaLayer(dtype=torch.float64)
    runner = Runner(layer, REFERENCES["delta"], width=2, state_dtype=torch.float64)
    sequence = Sequence(layer, 200, row=1)
    runner.prefill(sequence, 130, 29)
    for _ in range(18):
        runner.step([Decode(sequence, right=2)])


def test_equals_transformers():
    """The truth that all checks use, and the reference, give what Qwen3-Next's classes do."""
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    layer = DeltaLayer(key_heads=2, key_dim=32, value_heads=6, value_dim=48)
    sequence = Sequence(layer, 150, row=0)
    runner = Runner(layer, REFERENCES["delta"])
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


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input(kind):
    layer, ops = KINDS[kind](), KERNELS[kind]
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
                ops.decode(*arguments, DecodeRows(rows, positions, bases, width), rule, out)
        if width == 1:
            with pytest.raises(ValueError, match=message):
                ops.prefill(*arguments, chunks, bases, rule, out)

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
    expect("parameters must be contiguous", a_log=torch.zeros(8)[::2])
    expect("out must be", out=torch.zeros(4, 3))
    expect("2 chunks want 3 starts", chunks=prefill._replace(starts=bases))
    if kind == "mamba":
        expect(
            r"conv_weight \(128, 4\), conv_bias \(128,\), dt_bias, a_log and d \(4,\)",
            conv_bias=torch.zeros(4),
        )
    else:
        expect("input rows of 200; found rows of 100", layer.inputs(4)[:, :100])
        expect("0 key heads.*rows of no size", ring_xb=pools.ring_xb[:, :, :64])
        expect(r"conv_weight \(128, 4\), dt_bias and a_log \(4,\)", dt_bias=torch.zeros(3))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (MambaLayer(d_state=24), "d_state 24 must be a power of two"),
        (DeltaLayer(key_dim=24), "key_dim 24 must be one of"),
        (DeltaLayer(key_dim=512), "key_dim 512 must be one of"),
        (DeltaLayer(value_dim=40), "value_dim 40 must be a multiple of 16"),
    ],
)
def test_sizes_that_are_not_served(layer, message):
    with pytest.raises(ValueError, match=message):
        Runner(layer, REFERENCES[layer.kind]).prefill(Sequence(layer, 3, 0), 3)
