"""Products that several threads compute: exact, whichever takes which part, and nobody hangs."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from megatron_async.ops.cpu import compiler
from megatron_async.ops.linear.cpu import helpers
from tests.support.patience import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(not compiler.multiplies_integers(), reason="no Numba or no AVX2")


@pytest.fixture
def shares(monkeypatch):
    """Products of any size are shared, in chunks of one block."""
    monkeypatch.setattr(helpers, "LEAST_SHARED", 0)
    monkeypatch.setattr(helpers, "CHUNK_BYTES", 1)


class Case:
    """A weight and rows of integers, whose products float32 holds exactly."""

    def __init__(self, outputs, k, rows, seed):
        from megatron_async.ops.linear.cpu.widened_weight import WidenedWeight

        generator = torch.Generator().manual_seed(seed)
        weight = torch.randint(-127, 128, (outputs, k), generator=generator)
        x = torch.randint(-32767, 32768, (rows, k), generator=generator)
        weight[:, 0], x[:, 0] = 127, 32767  # so the scales are 1
        self.packed, self.x = WidenedWeight(weight.float()), x.float()
        self.expected = (x @ weight.T).double()

    def product(self, pool):
        with mock.patch(
            "megatron_async.ops.linear.cpu.widened_weight.helpers_of", return_value=pool
        ):
            return self.packed.product(self.x)

    def check(self, found):
        # One rounding to float32, and one for each of two factors.
        error = (found.double() - self.expected).abs()
        assert (error <= 3 * 2**-24 * self.expected.abs()).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 19])
@pytest.mark.parametrize(("outputs", "k"), [(1, 1), (7, 40), (64, 16), (5, 4096), (6, 4112)])
def test_exact(outputs, k, rows):
    case = Case(outputs, k, rows, seed=rows)
    case.check(case.product(helpers.Helpers(0)))


def test_helpers_share_every_product(shares):
    """Two thousand products in a row, each cut into as many chunks as it has blocks."""
    pool = helpers.Helpers(2)
    cases = [Case(40 + 4 * number, 48, 1 + number % 5, number) for number in range(10)]
    for turn in range(2000):
        case = cases[turn % len(cases)]
        case.check(case.product(pool))


def test_nobody_returns_before_a_helper_is_done(shares, monkeypatch):
    """Few chunks that take long: the last one is mostly a helper's."""
    monkeypatch.setattr(helpers, "PATIENCE", 200_000)
    pool, cases = helpers.Helpers(1), [Case(12, 2**18, 1, seed) for seed in range(4)]
    for turn in range(300):
        case = cases[turn % len(cases)]
        case.check(case.product(pool))


def test_threads_at_once(shares):
    """One has the helpers, the others compute alone; no result is another thread's."""
    pool = helpers.Helpers(1)
    cases = [Case(64, 64, 1 + number, number) for number in range(4)]
    from megatron_async.ops.linear.cpu import widened_weight

    def often(case):
        for _ in range(300):
            case.check(case.packed.product(case.x))

    with (
        mock.patch.object(widened_weight, "helpers_of", return_value=pool),
        ThreadPoolExecutor(len(cases)) as threads,
    ):
        list(threads.map(often, cases, timeout=PATIENCE_S))


def test_reads_no_memory_that_is_free():
    """Pages of large arrays go back to the system at once, and to read them ends the process."""
    code = """
import torch
from megatron_async.ops.linear.cpu.widened_weight import WidenedWeight
weight, x = torch.eye(4096), torch.randint(-9, 9, (64, 4096)).float()
x[:, 0] = 32767
packed = WidenedWeight(127 * weight)
for _ in range(3):
    assert torch.equal(packed.product(x), 127 * x)
"""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_PERTURB_": "85"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=PATIENCE_S)


def test_helpers_sleep_and_are_woken(shares):
    pool, case = helpers.Helpers(1), Case(400, 64, 2, 0)

    def awake():
        return bool(pool.awake)

    for _ in range(3):
        eventually(lambda: not awake())
        case.check(case.product(pool))
        eventually(lambda: not pool._wake[0].is_set())  # it has been woken


def test_a_forked_process_has_helpers_of_its_own():
    before = helpers.helpers_of(2)
    process = os.fork()
    if process == 0:
        os._exit(0 if helpers.helpers_of(2) is not before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert helpers.helpers_of(2) is before


def test_no_loops_for_a_cpu_that_numba_was_told_of(monkeypatch):
    from numba import config

    compiler.multiplies_integers.cache_clear()
    try:
        assert compiler.multiplies_integers()
        compiler.multiplies_integers.cache_clear()
        monkeypatch.setattr(config, "CPU_NAME", "generic")
        assert not compiler.multiplies_integers()
    finally:
        compiler.multiplies_integers.cache_clear()
