"""All implementations of an op give what its reference gives, on every case."""

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.ops.cpu.compiler import compiles
from megatron_async.ops.op import Op
from tests.unit_tests.ops.attention import cases as attention
from tests.unit_tests.ops.cases import Numbers, OpCase
from tests.unit_tests.ops.drafting import cases as drafting
from tests.unit_tests.ops.experts import cases as experts
from tests.unit_tests.ops.linear import cases as linear
from tests.unit_tests.ops.ranks import cases as ranks
from tests.unit_tests.ops.recurrent import cases as recurrent
from tests.unit_tests.ops.sampling import cases as sampling
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT, assert_rounded_alike

FAMILIES = (attention, drafting, experts, linear, ranks, recurrent, sampling)
CASES: list[OpCase] = [case for family in FAMILIES for case in family.CASES]
SMALL = [case for case in CASES if not case.is_large]
LARGE = [case for case in CASES if case.is_large]
FIRST: dict[Op[..., Any], OpCase] = {case.op: case for case in reversed(CASES)}
ON_CPU = [case for case in SMALL if "cpu" in case.op.supported()]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def tensors(found: Any) -> list[Tensor]:
    """Tensors of arguments or results, in their order."""
    if isinstance(found, Tensor):
        return [found]
    if is_dataclass(found):
        found = tuple(vars(found).values())
    return [t for each in found for t in tensors(each)] if isinstance(found, tuple | list) else []


def compare(case: OpCase, run: Callable[..., Any], at: Numbers, limit: float | None = None) -> None:
    """`run` and the reference: results, what they write to their arguments, and what they leave
    there."""
    sides = []
    for implementation in (run, case.op.reference):
        torch.manual_seed(0)
        arguments = case.make(at)
        found = case.shared(implementation(*arguments))
        sides.append((tensors(found), tensors(arguments)))
    (found, left), (expected, wanted) = sides
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=limit, atol=limit)
    given = {each.data_ptr() for each in left}
    assert all(each.is_contiguous() or each.data_ptr() in given for each in found)
    torch.testing.assert_close(left, wanted, equal_nan=True, rtol=limit, atol=limit)
    if at.dtype in EXACT_16_BIT:
        for one, other in zip([*found, *left], [*expected, *wanted], strict=True):
            assert_rounded_alike(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_kernels(case: OpCase, dtype: torch.dtype, device: str) -> None:
    compare(case, case.op.on("gpu"), Numbers(device, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_kernels_at_the_sizes_of_models(case: OpCase, dtype: torch.dtype) -> None:
    compare(case, case.op.on("gpu"), Numbers("cuda", dtype))


@pytest.mark.skipif(not compiles(), reason="Numba is not here, or switched off")
@pytest.mark.parametrize("case", ON_CPU, ids=str)
def test_loops(case: OpCase) -> None:
    """In float32; other dtypes are the reference's."""
    compare(case, case.op.on("cpu"), Numbers("cpu", torch.float32), 2e-6)
    compare(case, case.op.on("cpu"), Numbers("cpu", torch.bfloat16), 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FIRST.values(), ids=str)
def test_replays_in_a_graph(case: OpCase) -> None:
    at, run = Numbers("cuda", torch.bfloat16), case.op.on("gpu")
    arguments = case.make(at)
    run(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tensors(case.shared(run(*arguments)))
    for seed in range(3):
        torch.manual_seed(seed)
        others = case.make(at)
        for own, other in zip(tensors(arguments), tensors(others), strict=True):
            own.copy_(other)
        for each in found:
            if not any(each is own for own in tensors(arguments)):
                each.fill_(torch.nan if each.is_floating_point() else -7)
        graph.replay()
        expected = tensors(case.shared(case.op.reference(*others)))
        torch.testing.assert_close(found, expected, equal_nan=True)
        torch.testing.assert_close(tensors(arguments), tensors(others), equal_nan=True)
