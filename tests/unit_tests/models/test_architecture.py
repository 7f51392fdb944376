"""What follows from a stored layer pattern: counts, bytes, and what is refused."""

import dataclasses
import math

import pytest

from megatron_async.checkpoints.mapping import weights
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES

HYBRID = ModelArchitecture(
    "nemotron_h",
    5,
    64,
    4,
    2,
    16,
    96,
    128,
    pattern="MEM*-",
    activation="squared_relu",
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=40,
    mamba_num_heads=8,
    mamba_head_dim=16,
    mamba_state_dim=32,
    mamba_num_groups=2,
)


def test_a_transformer_s_pattern_follows():
    assert DUMMY_SHAPES["tiny"].pattern == "*-*-"
    assert DUMMY_SHAPES["tiny-moe"].pattern == "*E*E"
    assert DUMMY_SHAPES["tiny"].layers_per_block == 2
    assert HYBRID.layers_per_block == 1


def test_only_attention_has_keys():
    assert HYBRID.kv_bytes_per_token(2) == 2 * 1 * 2 * 16 * 2
    assert dataclasses.replace(HYBRID, pattern="M-M-E").kv_bytes_per_token(2) == 0


def test_a_rank_of_several_holds_a_share_of_heads_and_groups_or_all_of_one_group():
    assert HYBRID.mamba.of_rank(2).strips == {"z": 64, "x": 64, "B": 32, "C": 32, "dt": 4}
    single = dataclasses.replace(HYBRID, mamba_num_groups=1).mamba.of_rank(2)
    assert single.strips == {"z": 64, "x": 64, "B": 32, "C": 32, "dt": 4}
    assert single.groups == 1


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("MD*-E", r"'MD\*-E' has \['D'\]: it may have .*'M' \(Mamba-2\)"),
        ("MG*-E", "linear_num_value_heads = 0 must be a multiple of linear_num_key_heads = 0"),
        ("M*", "has 2 characters, but num_layers = 5"),
        ("M*-|*-", r"has \['\|'\]"),
    ],
)
def test_patterns_that_are_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HYBRID, pattern=pattern)


@pytest.mark.parametrize(
    ("shape", "billions", "kv_bytes", "state_mb"),
    [
        ("nemotron-3-nano-30b", 31.58, 6144, 48.2),
        ("nemotron-h-8b", 8.10, 16384, 100.7),
        ("granite-4.0-h-350m", 0.34, 4096, 22.0),
        ("qwen3-next-80b", 59.91, 18432, 56.6),  # cut to 36 of 48 layers
    ],
)
def test_well_known_hybrids_have_the_sizes_of_their_names(shape, billions, kv_bytes, state_mb):
    a = DUMMY_SHAPES[shape]
    assert a.num_parameters / 1e9 == pytest.approx(billions, abs=0.005)
    assert a.kv_bytes_per_token(2) == kv_bytes
    # Without the inputs that states have not taken in yet.
    state = 4 * a.count("M") * math.prod(a.mamba.state_shape)
    state += 4 * a.count("G") * math.prod(a.delta.state_shape)
    assert state / 1e6 == pytest.approx(state_mb, abs=0.05)


def test_the_whole_of_a_cut_shape_has_the_size_of_its_name():
    """Without the layers of multi-token prediction."""
    a = DUMMY_SHAPES["qwen3-next-80b"]
    whole = dataclasses.replace(a, num_layers=48, pattern="GEGEGE*E" * 12)
    assert whole.num_parameters / 1e9 == pytest.approx(79.67, abs=0.005)
    assert whole.num_active_parameters / 1e9 == pytest.approx(3.87, abs=0.005)
    assert a.num_parameters * 2 < 121e9


@pytest.mark.parametrize(
    "architecture",
    [
        HYBRID,
        dataclasses.replace(HYBRID, activation="silu", moe_router_enable_expert_bias=True),
        DUMMY_SHAPES["tiny-hybrid"],
        DUMMY_SHAPES["tiny-moe"],
        DUMMY_SHAPES["tiny-gated-delta"],
        dataclasses.replace(DUMMY_SHAPES["granite-4.0-h-350m"], hidden_size=64, vocab_size=99),
    ],
)
def test_the_counts_are_those_of_the_weights(architecture):
    names = [weight.name for weight in weights(architecture)]
    assert len(set(names)) == len(names)
    assert sum(math.prod(w.shape) for w in weights(architecture)) == architecture.num_parameters


def test_dictionaries_of_before_the_pattern_was_stored():
    values = DUMMY_SHAPES["tiny-moe"].to_dict()
    assert ModelArchitecture.from_dict(values) == DUMMY_SHAPES["tiny-moe"]
    for name in ("pattern", "activation", "mamba_num_heads"):
        del values[name]
    assert ModelArchitecture.from_dict(values) == DUMMY_SHAPES["tiny-moe"]
    assert ModelArchitecture.from_dict(values | {"dense_layers": [0]}).pattern == "*-*E"
