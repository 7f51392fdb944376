"""What is otherwise than in Triton 3.6 for this package's kernels: their keys are the same in every
process, and a launch takes the host less time (an engine's start makes 65,000).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver
from triton.runtime.jit import DependenciesFinder, JITFunction

OWN = "megatron_async."
TRITON_RUN: Callable[..., Any] = JITFunction.run
_KNOWN: dict[Any, tuple[Any, ...]] = {}
"""By kernel, device, and what arguments and options are: the kernel, it compiled, the function of C
that launches it, and what that function takes between the stream and the kernel's arguments."""


def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """`JITFunction.run`. A kernel of this package that was launched with such arguments before is
    called at once: Triton would first write its options as text, compare the constants of modules
    that it reads with what they were, and call two chains of hooks, also empty ones. Kernels of
    others may have options that cannot be keys, read what changes, and be compiled anew."""
    if not kernel.module.startswith(OWN):
        return TRITON_RUN(kernel, *args, grid=grid, warmup=warmup, **options)
    hooks = knobs.runtime
    is_hooked = _has_calls(hooks.launch_enter_hook) or _has_calls(hooks.launch_exit_hook)
    if warmup or is_hooked or hooks.debug or kernel.pre_run_hooks or callable(grid):
        return TRITON_RUN(kernel, *args, grid=grid, warmup=warmup, **options)
    active = driver.active
    device = active.get_current_device()
    bound, specialization, others = kernel.device_caches[device][4](*args, **options)
    key = id(kernel), device, *specialization, *others.items()
    if (known := _KNOWN.get(key)) is None:
        compiled = TRITON_RUN(kernel, *args, grid=grid, warmup=False, **options)
        launcher = None if compiled is None else compiled.run
        if isinstance(launcher, CudaLauncher) and not (
            launcher.global_scratch_size or launcher.profile_scratch_size
        ):
            flags = launcher.launch_cooperative_grid, launcher.launch_pdl
            # No scratch memory, and no hooks.
            own = None, None, compiled.packed_metadata, None, None, None
            given = compiled.function, *flags, *own
            _KNOWN[key] = kernel, compiled, launcher.launch, given
        return compiled
    _, compiled, launch, given = known
    x, y, z = (*grid, 1, 1)[:3]
    launch(x, y, z, active.get_current_stream(device), *given, *bound.values())
    return compiled


def _has_calls(chain: Any) -> Any:
    return getattr(chain, "calls", chain)


def _hash_callees_first(update_hash: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """A kernel's key has the constants of the functions that it calls, but only of those whose own
    key is known by then. So a kernel would have another key, and be compiled anew, in a process
    that launches kernels in another order."""

    def update(finder: Any, function: Any) -> None:
        if finder.name.startswith((OWN, "triton.")):
            function.cache_key  # noqa: B018
        update_hash(finder, function)

    return update


if triton.__version__.startswith("3.6."):  # what is inside another version may be otherwise
    JITFunction.run = run
    DependenciesFinder._update_hash = _hash_callees_first(DependenciesFinder._update_hash)
