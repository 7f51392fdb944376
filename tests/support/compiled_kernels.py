"""Kernels as an op launches them, and what each launch would be compiled for, on a machine without
a GPU.

A recorder stands in a kernel's place, so the op's own launch says what the arguments are; Triton
specialises and compiles them as it would on a Hopper GPU.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)
BACKEND = CUDABackend(HOPPER)


class Launch(NamedTuple):
    """One launch of a kernel, of tensors in host memory."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def bound(self) -> tuple[Any, ...]:
        """The arguments by name, what Triton specialises of each, and other options."""
        bind: Any = create_function_from_signature(
            self.kernel.signature, self.kernel.params, BACKEND
        )
        options = self.options | {"overlap": True, "launch_pdl": True}
        found: tuple[Any, ...] = bind(*self.arguments, **options)
        return found

    @property
    def key(self) -> str:
        """Launches with equal keys share a compiled kernel."""
        _arguments, specialization, options = self.bound()
        return str((specialization, sorted(options.items())))

    def compiled(self) -> Any:
        """The kernel, compiled for this launch."""
        arguments, specialization, options = self.bound()
        given, signature, constants, attributes = self.kernel._pack_args(
            BACKEND, options, arguments, specialization, options
        )
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = kind(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=HOPPER, options=vars(given))


class Recorder:
    """Stands where a kernel stood."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[Launch] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.launches.append(Launch(self.kernel, arguments, options))

        return launch


def record(monkeypatch: pytest.MonkeyPatch, *kernels: tuple[Any, str]) -> list[Recorder]:
    """Recorders in the place of kernels, which are a module and a name each."""
    recorders = []
    for module, name in kernels:
        recorders.append(Recorder(getattr(module, name)))
        monkeypatch.setattr(module, name, recorders[-1])
    return recorders


def compile_launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """From now on a launch compiles its kernel for an H100 or H200, if nothing like it was compiled
    before, and does not run it. Returns the keys of each kernel's compilations, by its name, which
    launches fill."""
    backend, keys = make_backend(HOPPER), defaultdict(set)

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        options |= {"debug": False, "instrumentation_mode": ""}
        bound, specialization, others = bind(*arguments, **options)
        key = compute_cache_key({}, specialization, others)
        if key not in keys[kernel.__name__]:
            keys[kernel.__name__].add(key)
            packed = kernel._pack_args(backend, options, bound, specialization, others)
            chosen, signature, constants, attributes = packed
            source = ASTSource(kernel, signature, constants, attributes)
            triton.compile(source, target=HOPPER, options=chosen.__dict__)

    monkeypatch.setattr(JITFunction, "run", run)
    return keys
