"""Import Megatron-Core without torch's compiler, which is needed only to call a fused function.

Megatron-Core decorates its fused functions with `torch.compile` when it is imported. The decorator
imports torch's compiler at once: `import megatron_async.llm` took 8.0 s and takes 3.8 (two cores,
2026-11-23). Here the decorator waits for the function's first call. This engine's own layers call
none of those functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch


def compile_later(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`torch.compile`, done when the function is called for the first time; what is no function is
    compiled at once."""
    if model is None:
        return partial(compile_later, **options)
    if not inspect.isfunction(model):
        return COMPILE(model, **options)
    compiled: list[Callable[..., Any]] = []

    @wraps(model)
    def call(*args: Any, **values: Any) -> Any:
        if not compiled:
            compiled.append(COMPILE(model, **options))
        return compiled[0](*args, **values)

    return call


COMPILE: Callable[..., Any] = torch.compile
# Megatron-Core takes the decorator from torch once, in `megatron.core.jit`.
torch.compile = compile_later
try:
    import megatron.core  # noqa: F401
finally:
    torch.compile = COMPILE
