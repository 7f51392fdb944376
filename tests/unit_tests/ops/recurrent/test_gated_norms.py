"""RMSNorm with a gate, of groups and of heads, against torch."""

import pytest
import torch
import torch.nn.functional as F

from megatron_async.ops.recurrent.gated_norms import (
    MAX_GROUP,
    gated_head_norm,
    gated_head_norm_gpu,
    gated_rms_norm,
    gated_rms_norm_gpu,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
NORMS = {
    "groups": (gated_rms_norm_gpu, gated_rms_norm.reference),
    "heads": (gated_head_norm_gpu, gated_head_norm.reference),
}


def arguments(kind, channels, groups, weight):
    """Arguments behind y and z: a weight of all channels, or of one head."""
    return (weight, groups, 1e-5) if kind == "groups" else (weight[: channels // groups], 1e-5)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("groups", torch.float32), ("heads", torch.float32), ("heads", torch.float64)],
)
def test_reference_is_the_formula(kind, dtype):
    """Each group alone, the gate before the norm: Megatron's norm_before_gate=False. Each head
    alone, the norm before the gate: Megatron's GatedDeltaNet._apply_gated_norm."""
    y, z = torch.randn(2, 3, 12, dtype=torch.float64)
    weight = torch.randn(12, dtype=torch.float64)
    given = (tensor.to(dtype) for tensor in (y, z))
    found = NORMS[kind][1](*given, *arguments(kind, 12, 3, weight.to(dtype)))
    for group in range(3):
        own = slice(4 * group, 4 * group + 4)
        value, gate = y[:, own], F.silu(z[:, own])
        if kind == "groups":
            value = value * gate
        value = value * (value.square().mean(1, keepdim=True) + 1e-5).rsqrt()
        value = value * (weight[own] if kind == "groups" else weight[:4] * gate)
        torch.testing.assert_close(found[:, own], value.to(dtype))


@pytest.mark.parametrize("kind", NORMS)
def test_a_row_that_is_not_finite_stays_alone(kind, device):
    y, z = torch.randn(2, 4, 32, device=device)
    y[1] = torch.nan
    out = NORMS[kind][0](y, z, *arguments(kind, 32, 2, torch.ones(32, device=device)))
    assert out.isfinite().all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("kind", "y", "z", "others", "message"),
    [
        ("groups", torch.ones(2, 8), torch.ones(2, 4), (torch.ones(8), 1), r"like it.*\(2, 4\)"),
        ("groups", torch.ones(2, 8), torch.ones(2, 8), (torch.ones(4), 1), r"weight \(8,\)"),
        ("groups", torch.ones(2, 8), torch.ones(2, 8), (torch.ones(8), 3), "groups divide 8"),
        ("groups", torch.ones(8, 2).t(), torch.ones(2, 8), (torch.ones(8), 1), "contiguous"),
        (
            "groups",
            *torch.ones(2, 1, 2 * MAX_GROUP),
            (torch.ones(2 * MAX_GROUP), 1),
            "32768 channels",
        ),
        ("heads", torch.ones(2, 8), torch.ones(2, 4), (torch.ones(4),), r"like it.*\(2, 4\)"),
        ("heads", torch.ones(2, 8), torch.ones(2, 8), (torch.ones(3),), r"one head of its.*\(3,\)"),
        ("heads", torch.ones(8, 2).t(), torch.ones(2, 8), (torch.ones(4),), "contiguous"),
        ("heads", *torch.ones(2, 1, 2 * MAX_GROUP), (torch.ones(2 * MAX_GROUP),), "32768 channels"),
    ],
)
def test_bad_input(kind, y, z, others, message):
    with pytest.raises(ValueError, match=message):
        NORMS[kind][0](y, z, *others, 1e-5)
