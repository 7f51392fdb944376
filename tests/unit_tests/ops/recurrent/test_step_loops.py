"""Loops of new bases and of flushes give what their references give."""

import pytest
import torch
from torch import Tensor

from megatron_async.ops.cpu import compiler
from megatron_async.ops.recurrent.cpu import host_recurrent
from megatron_async.ops.recurrent.flush import flush
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows, RecurrentPools
from tests.unit_tests.ops.cases import Numbers
from tests.unit_tests.ops.recurrent.cases import base_arguments

pytestmark = pytest.mark.skipif(
    not compiler.compiles(), reason="Numba is not here, or switched off"
)

ROWS, LAYERS, POISON = 8, 3, 77.0
"""Rows of the pools; layers; and what stands around the rows of pools."""


def pools_of(heads: int, groups: int, gates: int, dtype: torch.dtype) -> RecurrentPools:
    """Pools with numbers everywhere, in strips of larger tensors."""
    size, columns, ring = 5, 16, 21

    def strip(numbers: Tensor) -> Tensor:
        whole = torch.full((LAYERS, ROWS, 3, *numbers.shape[2:]), POISON, dtype=dtype)
        whole[:, :, 1] = numbers
        return whole[:, :, 1]

    sizes = LAYERS, ROWS
    decays = torch.rand(*sizes, ring, gates, heads)
    decays[..., 0, :] *= -0.2
    return RecurrentPools(
        strip(torch.randn(*sizes, heads, size, columns)),
        strip(torch.randn(*sizes, ring, heads * size + groups * columns)),
        strip(decays),
        strip(torch.randn(*sizes, 7, 11)),
    )


def copy_of(pools: RecurrentPools) -> RecurrentPools:
    return RecurrentPools(*(pool.clone() for pool in pools))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("heads", "groups", "gates"), [(4, 2, 2), (3, 1, 1), (6, 6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_flush(heads: int, groups: int, gates: int, dtype: torch.dtype, kind: torch.dtype) -> None:
    torch.manual_seed(heads)
    limit = 3e-6 if dtype == torch.float32 else 1e-13
    given = pools_of(heads, groups, gates, dtype)
    index = torch.tensor([2, 0, 5, 4, 7, 7]).to(kind)
    before, after = ints(16, 0, 1, 35, 0, 0, 9), ints(32, 0, 16, 36, 0, 0, 99)
    for saves in (None, ints(-1, 3, 1, -1, -1, -1, -1), ints(*[-1] * 6)):
        kept, expected = copy_of(given), copy_of(given)
        host_recurrent.flush_cpu(given, index, before, after, FlushRule(), saves)
        flush.reference(expected, index, before, after, FlushRule(), saves)
        for one, other in zip(given, expected, strict=True):
            scale = 1 + other.abs().max()
            torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=limit)
            around = one._base
            assert around is not None
            assert (around[:, :, ::2] == POISON).all()
        assert not torch.equal(given.state[:, 2], kept.state[:, 2])
        assert torch.equal(given.state[:, 6:], kept.state[:, 6:])
        for pool, source in zip(given, kept, strict=True):
            pool.copy_(source)


@pytest.mark.parametrize("wrong", [ROWS, -1, 2**31 - 1, -(2**31)])
def test_a_row_that_is_not_there_fails_the_step(wrong: int) -> None:
    pools, rule = pools_of(4, 2, 2, torch.float32), FlushRule()
    kept = copy_of(pools)
    before, after = ints(16, 0), ints(32, 16)
    with pytest.raises(IndexError, match="a row that the pools"):
        host_recurrent.flush_cpu(pools, ints(1, wrong), before, after, rule)
    if wrong > 0:  # below 0 nothing is kept
        with pytest.raises(IndexError, match="a row for a state to keep"):
            host_recurrent.flush_cpu(pools, ints(1, 2), before, after, rule, ints(-1, wrong))
    for pool, source in zip(pools, kept, strict=True):
        assert torch.equal(pool, source)
    base = ints(*range(ROWS))
    with pytest.raises(IndexError, match="a row that the pools"):
        host_recurrent.next_bases_cpu(base, ints(1, wrong), torch.tensor([50, 50]), 1, None, rule)
    assert torch.equal(base, ints(*range(ROWS)))


def test_wrong_bases_write_in_their_own_row() -> None:
    pools, far = pools_of(4, 2, 2, torch.float32), (-(2**31), -1, 0, 16, 2**31 - 1)
    kept = copy_of(pools)
    for begin in far:
        for end in far:
            host_recurrent.flush_cpu(pools, ints(1), ints(begin), ints(end), FlushRule())
            for pool, source in zip(pools, kept, strict=True):
                others = [0, *range(2, ROWS)]
                assert torch.equal(pool[:, others], source[:, others])
                around = pool._base
                assert around is not None
                assert (around[:, :, ::2] == POISON).all()


def test_what_the_loop_does_not_take_goes_to_the_reference() -> None:
    whole = pools_of(4, 2, 2, torch.float32)
    half = whole._replace(state=whole.state.bfloat16())
    found, expected = copy_of(half), copy_of(half)
    host_recurrent.flush_cpu(found, ints(1), ints(0), ints(16), FlushRule())
    flush.reference(expected, ints(1), ints(0), ints(16), FlushRule())
    assert torch.equal(found.state, expected.state)
    assert not torch.equal(found.state, half.state)
    host_recurrent.flush_cpu(whole, ints(), ints(), ints(), FlushRule())


def test_steps_with_chunks_are_the_references() -> None:
    base, rule = ints(0, 5, 16, 0), FlushRule()
    chunks = PrefillRows(ints(0, 40), ints(0), ints(1), ints(1), torch.tensor([True]))
    index, positions = torch.tensor([2]), torch.tensor([33])
    before, after = host_recurrent.next_bases_cpu(base, index, positions, 1, chunks, rule)
    assert before.tolist() == [16, 0]
    assert after.tolist() == [32, 32]
    assert base.tolist() == [0, 32, 32, 0]
    with pytest.raises(ValueError, match="decode rows"):
        host_recurrent.next_bases_cpu(base, index, positions[:0], 1, None, rule)
    with pytest.raises(ValueError, match="period"):
        host_recurrent.next_bases_cpu(base, index, positions, 1, None, FlushRule(period=3))


def test_a_loop_is_compiled_once_for_a_dtype() -> None:
    from megatron_async.ops.recurrent.cpu import step_loops

    loops = step_loops.flush, step_loops.next_bases
    host_recurrent.compile_step_loops()
    host_recurrent.flush_cpu(
        pools_of(4, 2, 2, torch.float64), ints(1), ints(0), ints(16), FlushRule()
    )
    before = [len(loop.signatures) for loop in loops]
    for kind in (torch.float32, torch.float64):
        test_flush(4, 2, 2, kind, torch.int64)
    at = Numbers("cpu", torch.float32)
    host_recurrent.next_bases_cpu(*base_arguments(at, 6, 0, 1, torch.int32, FlushRule()))
    assert before == [len(loop.signatures) for loop in loops]
