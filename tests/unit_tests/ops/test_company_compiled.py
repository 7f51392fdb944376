"""What a row's company can change in the machine code of the kernels that promise not to depend on
it. The interpreter shows orders of sums that a kernel's text says; only the compiler shows those
that it makes of them."""

import re

import pytest
import torch

from megatron_async.ops.experts import expert_routing
from megatron_async.ops.experts.expert_routing import BLOCK_TOKENS
from tests.support.compiled_kernels import record
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


@pytest.mark.parametrize("hidden", [400, 4096])
def test_parts_of_logits_begin_at_nought_wherever_they_are_added(hidden, monkeypatch):
    """Of few tokens parts are stored and added by the second kernel; of many the first adds them.

    Break it: add a share by `+`, which Triton makes the product's first sums where a share is one
    step.
    """
    (recorder, _) = record(
        monkeypatch, (expert_routing, "_logits_kernel"), (expert_routing, "_choose_kernel")
    )
    monkeypatch.setattr(expert_routing, "MOST_TILES", 2)
    weight = torch.zeros(40, hidden, dtype=torch.bfloat16)
    codes = {}
    for tokens in (1, 2, 16, 17, 32, 33, 4096):
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        expert_routing.route_invariant_gpu(x, weight, 4, False)
        launch = recorder.launches[-1]
        if launch.key not in codes:
            codes[launch.key] = launch.compiled().asm
    stored, joined = (len(re.findall(r"(?:add|fma)\S*\.f32", c["ptx"])) for c in codes.values())
    assert (stored, joined) == (0, BLOCK_TOKENS * 64 // 128), "one for each sum of a thread"
