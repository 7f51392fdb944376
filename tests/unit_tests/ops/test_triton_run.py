"""A kernel that is launched again is called with what Triton would call it with."""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron_async.ops import triton_run
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="launches")
STREAMS = iter(range(1000, 2000))


@pytest.fixture
def launched(monkeypatch):
    """Calls of the function of C that launches a kernel, for a GPU that is not there."""
    gpu = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: next(STREAMS),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(type(driver), "active", gpu)
    assert JITFunction.run is triton_run.run
    return []


LIMIT = triton.language.constexpr(1)


def kernel_that(launched, scratch=0, module="megatron_async.ops"):
    """A kernel whose compiled form writes its launches down, and how often it was compiled."""

    @triton.jit
    def kernel(x, count, tile: triton.language.constexpr):
        tile + LIMIT

    kernel.module = module
    compiled = []

    def compile_it(key, *_, **__):
        launcher = object.__new__(CudaLauncher)
        vars(launcher).update(
            global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=0,
            profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True, num_ctas=1,
            launch=lambda *args: launched.append(args),
        )  # fmt: skip
        made = SimpleNamespace(
            run=launcher, function=len(compiled), packed_metadata=("warps",),
            launch_metadata=lambda *_: None,
        )  # fmt: skip
        compiled.append(made)
        kernel.device_caches[0][0][key] = made
        return made

    kernel._do_compile = compile_it
    return kernel, compiled


def test_a_second_launch_is_the_first_without_hooks(launched):
    """Other pointers and numbers of the same kinds are no other kernel; other constants, options
    and alignments are.

    Break it: leave the options out of the key, or the stream of the first launch in it.
    """
    kernel, compiled = kernel_that(launched)
    memory = torch.zeros(64, dtype=torch.float32)
    for x, count, tile, warps in (
        (memory, 32, 8, 4), (memory[4:], 48, 8, 4), (memory, 32, 8, 4),
        (memory[1:], 32, 8, 4), (memory, 33, 8, 4), (memory, 32, 16, 4), (memory, 32, 8, 8),
    ):  # fmt: skip
        for grid in ((5,), (3, 2)):
            kernel[grid](x, count, tile, num_warps=warps)
            x_dim, y_dim, z_dim, stream, *rest = launched.pop()
            assert (x_dim, y_dim, z_dim) == (*grid, 1, 1)[:3]
            assert stream == next(STREAMS) - 1, "the stream of now"
            function, cooperative, pdl, *scratch_and_own = rest
            assert (cooperative, pdl) == (False, True)
            assert scratch_and_own[:4] == [None, None, ("warps",), None]
            assert scratch_and_own[6:] == [x, count, tile]
            assert function == len(compiled) - 1 or (x is memory and warps == 4 and tile == 8)
    assert len(compiled) == 5
    assert not launched


@pytest.mark.parametrize("why", ["hook", "scratch"])
def test_a_launch_that_needs_more_is_tritons(launched, monkeypatch, why):
    kernel, _ = kernel_that(launched, scratch=8 if why == "scratch" else 0)
    heard = []
    if why == "hook":
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [heard.append])
    else:
        monkeypatch.setattr(
            "triton.runtime._allocation._allocator",
            SimpleNamespace(get=lambda: lambda size, align, stream: ("memory", size)),
        )
    for _ in range(3):
        kernel[(5,)](torch.zeros(8), 32, 8)
        *_, scratch = launched[-1][:8]
        assert scratch == (("memory", 40) if why == "scratch" else None)
        assert launched[-1][11] is not None, "the chain of hooks"


def test_a_kernel_of_another_package_is_launched_by_triton(launched, monkeypatch):
    """Options of such a kernel may be no keys, and what it reads or was compiled to may change."""
    kernel, _ = kernel_that(launched, module="theirs")
    given = {"x": torch.zeros(64), "count": 32, "tile": 8, "extern_libs": {"libdevice": "there"}}
    for _ in range(2):
        kernel[(1,)](**given)
    kernel.device_caches.clear()
    kernel[(1,)](**given)
    assert [launch[4] for launch in launched] == [0, 0, 1]
    assert kernel.cache_key  # as a kernel that is compiled has
    monkeypatch.setitem(kernel.__globals__, "LIMIT", triton.language.constexpr(2))
    with pytest.raises(RuntimeError, match="LIMIT has changed"):
        kernel[(1,)](**given)
