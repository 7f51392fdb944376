"""Run tests of Triton kernels where there is no GPU: in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so `test_in_interpreter` starts such tests again
in a process of their own: those that use the fixtures `device` or `interpreter` (conftest.py).
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXACT_16_BIT = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)
"""Triton's interpreter truncates float32 to bfloat16 where a GPU rounds: no exact checks of it."""


def assert_rounded_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """One rounding of the same float32 numbers: only a sum in another order (and `exp` of another
    processor) can change one here and there: one in a hundred, or two."""
    differ = int((found != expected).sum())
    assert differ <= max(2, 0.01 * expected.numel()), f"{differ} of {expected.numel()} differ"


def run_in_interpreter(*test_files: str) -> None:
    """Run the tests of kernels in these files that are not for a GPU alone; there must be some."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", *test_files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout, run.stdout


def multiply_as_matrix_units(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """In place of the interpreter's `create_dot`, whose order is NumPy's, and changes with the
    rows: 16 inputs at a time, whose products are exact, are added to the sums."""
    sums = d.data
    for at in range(0, a.data.shape[-1], 16):
        left, right = a.data[..., at : at + 16], b.data[..., at : at + 16, :]
        some = np.matmul(left, right, dtype=np.float64)
        sums = (sums + some).astype(np.float32)
    return interpreter.TensorHandle(sums, d.dtype.scalar)


def patch_index(patch_lang_tensor: Callable) -> Callable:
    """In place of `interpreter._patch_lang_tensor`: Triton 3.6's interpreter takes `int()` of an
    array of one element where a loop's bound is on the device; NumPy 2.5 refuses that."""

    def patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patch


def round_to_e4m3(convert_float: Callable) -> Callable:
    """In place of `interpreter._convert_float`: Triton 3.6's interpreter loses the carry where a
    mantissa is rounded up to the next power of two, and makes a number of NaN."""

    def convert(values: Any, before: Any, after: Any, rounding: Any) -> Any:
        if (before, after) != (interpreter.tl.float32, interpreter.tl.float8e4nv):
            return convert_float(values, before, after, rounding)
        rounded = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    return convert


def patch_language_once_a_launch(patch_lang: Callable) -> Callable:
    """In place of `interpreter._patch_lang`: Triton 3.6's interpreter replaces the functions of
    `triton.language` at every call of a device function, which is half of its time; within one
    launch, once for each module is enough."""
    languages: dict[Callable, frozenset[int]] = {}
    launch = interpreter._LangPatchScope()
    patched: set[int] = set()

    def patch(function: Callable) -> interpreter._LangPatchScope:
        nonlocal launch
        if function not in languages:
            known = (interpreter.tl, interpreter.tl.core)
            values = function.__globals__.values()
            languages[function] = frozenset(id(m) for m in known if any(v is m for v in values))
        is_launch = not launch._changes  # the launch before has put everything back
        if is_launch:
            patched.clear()
        elif languages[function] <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages[function])
        scope = patch_lang(function)
        if is_launch:
            launch = scope
        return scope

    return patch
