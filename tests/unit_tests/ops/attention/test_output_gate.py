"""The gate of attention's output against plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_async.ops.attention.output_gate import output_gate, output_gate_gpu
from tests.unit_tests.ops.attention.cases import gate_arguments
from tests.unit_tests.ops.cases import Numbers


def test_reference_is_the_formula():
    attended, mixed, kv_heads = gate_arguments(Numbers("cpu", torch.float32), 3, 2, 4, 8)
    gates = mixed.unflatten(1, (kv_heads, -1, 8))[:, :, 4:8].flatten(1, 2)
    found = output_gate.reference(attended, mixed, kv_heads)
    torch.testing.assert_close(found, attended * gates.sigmoid())


def test_bad_input():
    attended, mixed, _ = gate_arguments(Numbers("cpu", torch.float32), 2, 2, 3, 8)
    for op in (output_gate_gpu, output_gate.reference):
        with pytest.raises(ValueError, match=r"wants a mixed_qkv of \(2, 128\), queries, gates"):
            op(attended, mixed[:, 8:], 2)
        with pytest.raises(ValueError, match="with 4 KV heads"):
            op(attended, mixed, 4)
        with pytest.raises(ValueError, match="attended must be contiguous"):
            op(attended.transpose(0, 1).contiguous().transpose(0, 1), mixed, 2)
