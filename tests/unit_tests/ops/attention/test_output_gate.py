"""The gate of attention's output against plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_async.ops.attention.output_gate import output_gate, output_gate_gpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def rows(tokens, kv_heads, group, dim, dtype, device):
    """What attention gives, and rows of `linear_qkv` of which the gates alone are numbers."""
    attended = torch.randn(tokens, kv_heads * group, dim, device=device).to(dtype)
    mixed = torch.full((tokens, kv_heads, 2 * group + 2, dim), torch.nan, device=device)
    gates = 3 * torch.randn(tokens, kv_heads, group, dim, device=device)
    mixed[:, :, group : 2 * group] = gates
    padded = torch.nn.functional.pad(mixed.flatten(1).to(dtype), (0, 5))
    return attended, padded[:, :-5], gates.to(dtype).flatten(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "dim"),
    [(3, 2, 8, 256), (5, 1, 3, 24), (1, 4, 1, 16), (0, 2, 2, 8)],
)
def test_equals_torch(tokens, kv_heads, group, dim, dtype, device):
    attended, mixed, gates = rows(tokens, kv_heads, group, dim, dtype, device)
    found = output_gate_gpu(attended, mixed, kv_heads)
    expected = (attended.float() * gates.float().sigmoid()).to(dtype)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(output_gate.reference(attended, mixed, kv_heads), expected)


def test_bad_input():
    attended, mixed, _gates = rows(2, 2, 3, 8, torch.float32, "cpu")
    for op in (output_gate_gpu, output_gate.reference):
        with pytest.raises(ValueError, match=r"wants a mixed_qkv of \(2, 128\), queries, gates"):
            op(attended, mixed[:, 8:], 2)
        with pytest.raises(ValueError, match="with 4 KV heads"):
            op(attended, mixed, 4)
        with pytest.raises(ValueError, match="attended must be contiguous"):
            op(attended.transpose(0, 1).contiguous().transpose(0, 1), mixed, 2)
