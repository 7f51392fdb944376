import pytest
import torch

from megatron_async.ops.persistent.persistent_layers import (
    LayerWeights,
    PersistentLayers,
    plan_for,
)
from megatron_async.ops.persistent.persistent_plan import (
    LEAST_SLOTS,
    MOST_SLOTS,
    WARPS,
    LayerSizes,
    PersistentPlan,
    plan_layers,
)

HOPPER = (132, 232448)
SMOLLM2 = LayerSizes(576, 1536, 3, 3, 64)
SHAPES = {
    "smollm2-135m": SMOLLM2,
    "qwen3-0.6b": LayerSizes(1024, 3072, 8, 2, 128),
    "llama-3.2-1b": LayerSizes(2048, 8192, 8, 4, 64),
    "llama-3.1-8b": LayerSizes(4096, 14336, 8, 4, 128),
}


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_plans(sizes):
    plan = plan_layers(sizes, *HOPPER)
    assert plan is not None
    assert sizes.heads <= plan.programs <= 132
    assert WARPS * (plan.programs - 1) < sizes.ffn  # all have an output of fc1
    assert LEAST_SLOTS <= plan.slots <= MOST_SLOTS
    assert 1 <= plan.parts * sizes.kv_heads <= plan.programs
    for inputs, place in ((sizes.hidden, plan.hidden_padded), (sizes.ffn, plan.ffn_padded)):
        units = -(-inputs // (plan.unit_chunks * 256))
        assert units * plan.unit_chunks * 256 <= place < 4 * max(inputs, 256)


def test_a_balanced_last_round():
    """1,536 outputs are two rounds of 96 programs, not one of 132 and a small one."""
    plan = plan_layers(SMOLLM2, *HOPPER)
    assert (plan.programs, plan.parts, plan.unit_chunks, plan.slot_width) == (96, 32, 3, 1024)


@pytest.mark.parametrize(
    ("sizes", "processors", "shared"),
    [
        (LayerSizes(576, 1536, 3, 3, 80), *HOPPER),
        (LayerSizes(584, 1536, 3, 3, 64), *HOPPER),
        (LayerSizes(576, 1544, 3, 3, 64), *HOPPER),  # words of two vectors read together
        (LayerSizes(8192, 28672, 8, 8, 128), *HOPPER),  # no room for a ring
        (LayerSizes(576, 1536, 3, 3, 64), 132, 64 << 10),
        (LayerSizes(4096, 200, 32, 1, 128), *HOPPER),  # fewer programs than heads
    ],
)
def test_what_is_not_served(sizes, processors, shared):
    assert plan_layers(sizes, processors, shared) is None


def test_only_on_a_gpu():
    assert plan_for(SMOLLM2, torch.device("cpu")) is None


def layer(**changes):
    sizes = SMOLLM2
    shapes = {
        "qkv": (sizes.qkv, 576), "proj": (576, 576), "fc1": (3072, 576), "fc2": (576, 1536),
        "input_norm": (576,), "mlp_norm": (576,),
    }  # fmt: skip
    found = {name: torch.zeros(*shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    return LayerWeights(**found | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc1": torch.zeros(1536, 576).bfloat16()}, r"fc1 of layer 1 must be .*\(3072, 576\)"),
        ({"proj": torch.zeros(576, 576)}, r"proj of layer 1 must be contiguous bfloat16"),
        ({"fc2": torch.zeros(1536, 576).bfloat16().T}, "fc2 of layer 1 must be contiguous"),
        ({}, "no kernel of all layers for .* on cpu: run the layers one by one"),
    ],
)
def test_weights_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        PersistentLayers([layer(), layer(**changes)], SMOLLM2, 1e-5, 0.125)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": torch.zeros(2, 2, 4, 16, 2, 64).bfloat16()}, r"cache \(2, 2, 4, 16, 3, 64\) is"),
        ({"cache": torch.zeros(2, 2, 4, 16, 3, 64)}, "torch.float32"),
        ({"hidden_states": torch.zeros(2, 576).bfloat16()}, "one row is one token"),
        ({"sin": torch.zeros(9, 32)}, r"\[positions, 64\], not \(9, 64\) and \(9, 32\)"),
    ],
)
def test_a_step_that_does_not_fit(changes, message):
    plan = PersistentPlan(96, 32, 9, 3, 1024, 1024, 2048)
    layers = PersistentLayers([layer(), layer()], SMOLLM2, 1e-5, 0.125, plan)
    arguments = {
        "hidden_states": torch.zeros(1, 576).bfloat16(),
        "cos": torch.zeros(9, 64),
        "sin": torch.zeros(9, 64),
        "position_ids": torch.zeros(1).long(),
        "write_index": torch.zeros(1).long(),
        "cache": torch.zeros(2, 2, 4, 16, 3, 64).bfloat16(),
        "block_table": torch.zeros(4).int(),
    }
    with pytest.raises(ValueError, match=message):
        layers.run(**arguments | changes)
