"""Launches of Triton kernels where there is no GPU: what each would be compiled for."""

from collections import defaultdict
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)


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
