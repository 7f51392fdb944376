"""Loops of recurrent layers' decode rows give what their references give."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.ops.cpu import compiler
from megatron_async.ops.recurrent.recurrent_pools import DecodeRows, FlushRule, RecurrentPools
from tests.unit_tests.ops.recurrent import recurrent_checks as checks
from tests.unit_tests.ops.recurrent.recurrent_layers import (
    LOOPS,
    REFERENCES,
    DeltaLayer,
    MambaLayer,
)

pytestmark = pytest.mark.skipif(
    not compiler.compiles(), reason="Numba is not here, or switched off"
)

LAYERS = {
    "mamba": MambaLayer(),
    "one group": MambaLayer(heads=3, groups=1, head_dim=21, d_state=64),
    "many groups": MambaLayer(heads=8, groups=8, head_dim=3),
    "delta": DeltaLayer(),
    "one key head": DeltaLayer(key_heads=1, value_heads=3, key_dim=64, value_dim=48),
    "a head each": DeltaLayer(key_heads=5, value_heads=5, key_dim=32),
}
KINDS = {name: (LOOPS[one.kind], REFERENCES[one.kind], one) for name, one in LAYERS.items()}
ROWS, POISON = 7, 77.0
"""Rows of the pools, the last for rows without a request; and what stands around the pools."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    return KINDS[request.param]


def filled_pools(layer: Any, rule: FlushRule, width: int, dtype: torch.dtype) -> RecurrentPools:
    """Pools with numbers everywhere, in strips of larger tensors."""
    heads = layer.state_size[0]
    # Logarithms of decays, and gains if there are any.
    signs = torch.tensor([[-0.2], [1.0]])[: layer.gates]
    ring, conv = rule.ring_length(width) + 2, rule.conv_length(width) + 1

    def strip(numbers: Tensor) -> Tensor:
        whole = torch.full((ROWS, 3, *numbers.shape[1:]), POISON, dtype=dtype)
        whole[:, 1] = numbers
        return whole[:, 1]

    return RecurrentPools(
        strip(torch.randn(ROWS, *layer.state_size)),
        strip(torch.randn(ROWS, ring, layer.ring_dim) / 4),
        strip(torch.rand(ROWS, ring, layer.gates, heads) * signs),
        strip(torch.randn(ROWS, conv, layer.conv_dim)),
    )


def step_of(width: int, rule: FlushRule, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Rows, positions and bases of a step: full rows, rows with fewer drafts, empty and dummies."""
    index = torch.randperm(ROWS - 1, generator=generator)[:4].tolist() + [ROWS - 1] * 2
    positions, bases = [], []
    for row in index:
        first = int(torch.randint(1, 300, (1,), generator=generator))
        count = int(torch.randint(0, width + 1, (1,), generator=generator))
        behind = int(torch.randint(0, rule.window(1), (1,), generator=generator))
        count = 0 if row == ROWS - 1 else count
        positions += [first + query if query < count else 0 for query in range(width)]
        bases.append(max(first - behind, 0))
    return torch.tensor(index), torch.tensor(positions), torch.tensor(bases, dtype=torch.int32)


def cast(params: Any, dtype: torch.dtype) -> Any:
    return type(params)(*(tensor.to(dtype) for tensor in params))


@pytest.mark.pairs
@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps(kind: tuple[Any, Any, Any], width: int, dtype: torch.dtype) -> None:
    ops, references, layer = kind
    generator = torch.Generator().manual_seed(width)
    torch.manual_seed(width)
    limit = 3e-6 if dtype == torch.float32 else 1e-13
    for lag in (0, 3):
        rule = FlushRule(lag=lag)
        given = filled_pools(layer, rule, width, dtype)
        expected = RecurrentPools(*(pool.clone() for pool in given))
        for turn in range(6):
            index, positions, bases = step_of(width, rule, generator)
            inputs = layer.inputs(len(positions)).to(dtype)
            if turn % 2:
                index = index.int()
            arguments = DecodeRows(index, positions, bases, width), rule
            found = ops.decode(inputs, cast(layer.params, dtype), given, *arguments)
            wanted = references.decode(inputs, cast(layer.params, dtype), expected, *arguments)
            for one, other in zip((found, *given), (wanted, *expected), strict=True):
                scale = 1 + other.abs().max()
                torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=limit)
            empty = positions == 0
            assert not found[empty].any()
            assert empty.any()
            # What lies between rows of pools is somebody else's.
            for pool in given:
                around = pool._base
                assert around is not None
                assert (around[:, ::2] == POISON).all()
            given = RecurrentPools(
                *(pool.copy_(other) for pool, other in zip(given, expected, strict=True))
            )


@pytest.mark.parametrize("lag", [0, 2])
def test_sequences(kind: tuple[Any, Any, Any], lag: int) -> None:
    """A plain recurrence of each token in turn says the same; pools begin full of NaN."""
    ops, _references, layer = kind
    checks.check_split(layer, ops, (17, 2, 1), rule=FlushRule(lag=lag))
    checks.check_packed(layer, ops)
    checks.check_widths(layer, ops)
    checks.check_wide_row_is_causal(layer, ops)
    checks.check_taken_back(layer, ops)
    checks.check_same_step_again(layer, ops, 3)
    checks.check_slot_reuse(layer, ops)
    checks.check_row_at_its_limit(layer, ops)
    checks.check_saves(layer, ops)


def test_a_row_depends_on_no_other(kind: tuple[Any, Any, Any]) -> None:
    """A row has its bits alone and beside others, and in wide rows beside narrow ones."""
    ops, _references, layer = kind
    rule, width = FlushRule(), 3
    torch.manual_seed(1)
    first = filled_pools(layer, rule, width, torch.float32)
    pools = [RecurrentPools(*(pool.clone() for pool in first)) for _ in range(2)]
    index = torch.tensor([3, 0, 5])
    positions = torch.tensor([20, 21, 22, 7, 8, 0, 40, 0, 0])
    bases, inputs = torch.tensor([16, 0, 32], dtype=torch.int32), layer.inputs(9)
    step = DecodeRows(index, positions, bases, width)
    together = ops.decode(inputs, layer.params, pools[0], step, rule)
    for row in (2, 0, 1):
        own = slice(row * width, row * width + width)
        step = DecodeRows(index[row:][:1], positions[own], bases[row:], width)
        alone = ops.decode(inputs[own], layer.params, pools[1], step, rule)
        assert torch.equal(alone, together[own])
    for found, expected in zip(*pools, strict=True):
        assert torch.equal(found, expected)
    step = DecodeRows(index[2:], positions[6:], bases[2:], 1)
    found = ops.decode(inputs[6:7], layer.params, first, step, rule)
    assert torch.equal(found[0], together[6])


@pytest.mark.parametrize("wrong", [-1, ROWS, 2**31 - 1, -(2**31)])
def test_a_row_that_is_not_there_fails_the_step(kind: tuple[Any, Any, Any], wrong: int) -> None:
    ops, _references, layer = kind
    rule = FlushRule()
    pools = filled_pools(layer, rule, 1, torch.float32)
    before = [pool.clone() for pool in pools]
    positions, bases = torch.tensor([5, 6]), torch.zeros(2, dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        index = torch.tensor([1, wrong]).to(dtype)
        step = DecodeRows(index, positions, bases, 1)
        with pytest.raises(IndexError, match="a row that the pools"):
            ops.decode(layer.inputs(2), layer.params, pools, step, rule)
    for pool, kept in zip(pools, before, strict=True):
        assert torch.equal(pool, kept)


def test_wrong_positions_and_bases_write_in_their_own_row(kind: tuple[Any, Any, Any]) -> None:
    ops, _references, layer = kind
    rule, width = FlushRule(lag=1), 2
    far = (-(2**31), -5, 0, 1, 16, 200, 2**31 - 2)
    for first in (*far, 2**40):
        for base in far:
            pools = filled_pools(layer, rule, width, torch.float32)
            before = [pool.clone() for pool in pools]
            positions = torch.tensor([first, first + 1, 20, 21])
            bases = torch.tensor([base, 16], dtype=torch.int32)
            index = torch.tensor([1, 4])
            step = DecodeRows(index, positions, bases, width)
            ops.decode(layer.inputs(4), layer.params, pools, step, rule)
            for pool, kept in zip(pools, before, strict=True):
                assert torch.equal(pool[[0, 2, 3, 5, 6]], kept[[0, 2, 3, 5, 6]])
                around = pool._base
                assert around is not None
                assert (around[:, ::2] == POISON).all()


def test_too_few_inputs_are_refused(kind: tuple[Any, Any, Any]) -> None:
    ops, _references, layer = kind
    rule = FlushRule()
    pools = filled_pools(layer, rule, 1, torch.float32)
    index, positions = torch.tensor([0, 1]), torch.tensor([5, 6])
    bases = torch.zeros(2, dtype=torch.int32)
    for inputs, at, base in (
        (layer.inputs(1), positions, bases),
        (layer.inputs(2), positions[:1], bases),
        (layer.inputs(2), positions, bases[:1]),
    ):
        with pytest.raises(ValueError, match="want"):
            ops.decode(inputs, layer.params, pools, DecodeRows(index, at, base, 1), rule)


@pytest.mark.parametrize("case", ["16 bits", "state of 16 bits", "parameters of another dtype"])
def test_what_the_loops_do_not_take_goes_to_the_references(kind: tuple[Any, Any, Any], case: str):
    ops, references, layer = kind
    rule, params, inputs = FlushRule(), layer.params, layer.inputs(2)
    pools = filled_pools(layer, rule, 1, torch.float32)
    if case == "16 bits":
        inputs, half = inputs.bfloat16(), cast(params, torch.bfloat16)
        params = half._replace(a_log=params.a_log)
        pools = pools._replace(ring_xb=pools.ring_xb.bfloat16(), conv=pools.conv.bfloat16())
    elif case == "state of 16 bits":
        pools = pools._replace(state=pools.state.bfloat16())
    else:
        params = params._replace(dt_bias=params.dt_bias.double())
    bases = torch.tensor([4, 0], dtype=torch.int32)
    step = DecodeRows(torch.tensor([2, 6]), torch.tensor([9, 0]), bases, 1)
    others = RecurrentPools(*(pool.clone() for pool in pools))
    found = ops.decode(inputs, params, pools, step, rule)
    assert torch.equal(found, references.decode(inputs, params, others, step, rule))
    for pool, other in zip(pools, others, strict=True):
        assert torch.equal(pool, other)


def test_a_loop_is_compiled_once_for_a_dtype() -> None:
    from megatron_async.ops.recurrent.cpu import decode_loops, host_recurrent

    host_recurrent.compile_loops()
    loops = decode_loops.mamba_decode, decode_loops.delta_decode
    before = [len(loop.signatures) for loop in loops]
    for ops, _references, layer in KINDS.values():
        checks.check_packed(layer, ops)
    assert before == [len(loop.signatures) for loop in loops]
