"""Fused split, q/k norm, rotary and KV append against torch and against the modules' path."""

import pytest
import torch

from megatron_async.ops.attention.output_gate import output_gate, output_gate_gpu
from megatron_async.ops.attention.rope_append import (
    apply_rotary_reference,
    rope_append,
    rope_append_gpu,
)
from tests.unit_tests.ops.attention.cases import gate_arguments, rope_arguments
from tests.unit_tests.ops.cases import Numbers
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT, assert_rounded_alike

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def inputs(tokens, kv_heads, group, dim, dtype, device, norm, rotated=None):
    """Arguments of rope_append, caches full of NaN."""
    sizes = tokens, kv_heads, group, dim, norm
    arguments = rope_arguments(Numbers(device, dtype), *sizes, rotated=rotated)
    return list(arguments[: 10 if norm else 7])


def check(arguments):
    qkv, cos, sin, positions, places, keys, values, *norm = arguments
    expected_keys, expected_values = keys.clone(), values.clone()
    query = rope_append_gpu(*arguments)
    expected = rope_append.reference(
        qkv, cos, sin, positions, places, expected_keys, expected_values, *norm
    )
    assert query.is_contiguous()
    assert query.dtype == qkv.dtype
    torch.testing.assert_close(query, expected)
    # NaN where nothing belongs: the kernel wrote the step's places and no other.
    torch.testing.assert_close(keys, expected_keys, equal_nan=True)
    torch.testing.assert_close(values, expected_values, equal_nan=True, rtol=0, atol=0)
    if qkv.dtype in EXACT_16_BIT:
        assert_rounded_alike(query, expected)
    return query


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "rotated"),
    [(2, 3, 64, 32), (1, 2, 80, 20), (2, 1, 8, 6), (2, 2, 16, 2), (3, 2, 64, 0)],
)
def test_only_the_first_elements_are_rotated(kv_heads, group, dim, rotated, dtype, norm, device):
    arguments = inputs(5, kv_heads, group, dim, dtype, device, norm, rotated=rotated)
    query = check(arguments)
    if not norm:
        heads = arguments[0].view(5, kv_heads, group + 2, dim)
        plain = heads[:, :, :group].flatten(1, 2)
        assert torch.equal(query[..., rotated:], plain[..., rotated:])
        keys = arguments[5].flatten(0, 1)[arguments[4]]
        assert torch.equal(keys[..., rotated:], heads[:, :, group, rotated:])
        assert rotated == 0 or not torch.equal(query, plain)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "rotated"), [(2, 3, 64, 16), (1, 1, 16, 16), (2, 8, 32, 8)]
)
def test_gates_behind_the_queries_are_passed_over(
    kv_heads, group, dim, rotated, dtype, norm, device
):
    """Bits are those without them, and nothing of them is read."""
    plain = inputs(5, kv_heads, group, dim, dtype, device, norm, rotated=rotated)
    expected = check(plain)
    heads = plain[0].unflatten(1, (kv_heads, group + 2, dim))
    gates = torch.full((5, kv_heads, group, dim), torch.nan, dtype=dtype, device=device)
    gated = torch.cat((heads[:, :, :group], gates, heads[:, :, group:]), 2).flatten(1)
    caches = [cache.clone().fill_(torch.nan) for cache in plain[5:7]]
    for op in (rope_append_gpu, rope_append.reference):
        norms = dict(zip(("q_weight", "k_weight", "eps"), plain[7:]))
        query = op(gated, *plain[1:5], *caches, **norms, has_gate=True)
        torch.testing.assert_close(query, expected)
        for found, wanted in zip(caches, plain[5:7], strict=True):
            torch.testing.assert_close(found, wanted, equal_nan=True)
    with pytest.raises(ValueError, match="as many gates, and 2"):
        rope_append_gpu(gated[:, :-1], *plain[1:5], *caches, has_gate=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
def test_equals_the_modules(dtype, norm, device):
    """Megatron's split, RMSNorm modules, cos and sin in the dtype, index_copy."""
    arguments = inputs(6, 3, 3, 64, dtype, device, norm)
    qkv, cos, sin, positions, places, keys, values, *weights = arguments
    query = rope_append_gpu(*arguments)
    parts = qkv.view(6, 3, 5, 64)
    expected, key, value = parts[:, :, :3].reshape(6, 9, 64), parts[:, :, 3], parts[:, :, 4]
    if norm:
        expected = torch.rms_norm(expected, (64,), weights[0], weights[2])
        key = torch.rms_norm(key, (64,), weights[1], weights[2])
    cos, sin = cos[positions][:, None].to(dtype), sin[positions][:, None].to(dtype)
    expected, key = apply_rotary_reference(expected, key, cos, sin)
    # Three more roundings there: in bfloat16 a few units of the last place of the largest term.
    limits = {"rtol": 2e-2, "atol": 4e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(query, expected, **limits)
    torch.testing.assert_close(keys.flatten(0, 1)[places], key, **limits)
    assert torch.equal(values.flatten(0, 1)[places], value)


def test_a_value_that_is_not_finite_stays_in_its_place(device):
    """Rotation must not mix an overflowed value into other lanes."""
    arguments = inputs(1, 1, 2, 8, torch.float32, device, norm=False)
    arguments[0][0, -1] = torch.inf
    rope_append_gpu(*arguments)
    stored = arguments[6].flatten(0, 1)[arguments[4]].view(-1)
    assert stored.isinf().tolist() == [False] * 7 + [True]


def test_bad_input():
    good = inputs(2, 2, 2, 8, torch.float32, "cpu", norm=True)

    def expect(message, **changes):
        names = ("mixed_qkv", "cos", "sin", "position_ids", "write_index", "key_cache")
        arguments = dict(zip((*names, "value_cache", "q_weight", "k_weight", "eps"), good))
        with pytest.raises(ValueError, match=message):
            rope_append_gpu(**{**arguments, **changes})

    expect("rows of 63 elements", mixed_qkv=good[0][:, :63])
    expect("rows of 32 elements", mixed_qkv=good[0][:, :32])
    expect("cos and sin must be alike", cos=good[1][:, :4])
    for width in (3, 10):
        table = torch.zeros(200, width)
        expect("an even number up to 8", cos=table, sin=table)
    expect("caches alike", value_cache=good[6][:1])
    expect("both q_weight and k_weight", k_weight=None)
    expect("contiguous", mixed_qkv=good[0].t().contiguous().t())
    expect("contiguous", key_cache=good[5].transpose(0, 1).contiguous().transpose(0, 1))


def test_reference_is_the_formula():
    attended, mixed, kv_heads = gate_arguments(Numbers("cpu", torch.float32), 3, 2, 4, 8)
    gates = mixed.unflatten(1, (kv_heads, -1, 8))[:, :, 4:8].flatten(1, 2)
    found = output_gate.reference(attended, mixed, kv_heads)
    torch.testing.assert_close(found, attended * gates.sigmoid())


def test_bad_input_of_the_gate():
    attended, mixed, _ = gate_arguments(Numbers("cpu", torch.float32), 2, 2, 3, 8)
    for op in (output_gate_gpu, output_gate.reference):
        with pytest.raises(ValueError, match=r"wants a mixed_qkv of \(2, 128\), queries, gates"):
            op(attended, mixed[:, 8:], 2)
        with pytest.raises(ValueError, match="with 4 KV heads"):
            op(attended, mixed, 4)
        with pytest.raises(ValueError, match="attended must be contiguous"):
            op(attended.transpose(0, 1).contiguous().transpose(0, 1), mixed, 2)
