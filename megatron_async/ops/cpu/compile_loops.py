"""Compile the loops of this folder before the first step: nothing in the folder imports this file,
so the list of all loops is here."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron_async.ops.cpu.compiler import compiles, multiplies_integers

logger = logging.getLogger("megatron_async")


def compile_missing(progress: bool = False) -> None:
    """`compile_all`, if the loops do not lie on the disk, where none fits or this is the first
    time: in a step they would take so long that its replica would count as lost."""
    if not compiles():
        return
    from megatron_async.ops.attention.cpu import attention_kernels
    from megatron_async.ops.cpu import row_kernels, step_kernels
    from megatron_async.ops.cpu.kept_loops import is_kept
    from megatron_async.ops.sampling.cpu import sampling_kernels

    dear = (
        attention_kernels.decode_attention, row_kernels.norm, step_kernels.unpack_rows,
        sampling_kernels.draw,
    )  # fmt: skip
    if not all(map(is_kept, dear)):
        logger.warning("Compiling loops for this CPU: a minute or so.")
        compile_all(progress=progress)


def compile_all(has_float64: bool = False, progress: bool = False) -> None:
    """Compile the loops, so that no first step does: half a minute to a minute once for a machine,
    for Numba keeps what it has compiled beside the source, or in the user's cache if that cannot be
    written.

    Args:
        has_float64: the loops of float64 too, which tests use.
        progress: show a bar on stderr, if that is a terminal.
    """
    if not compiles():
        return
    from tqdm import tqdm

    parts = _parts(has_float64)
    form = "{desc}: {percentage:3.0f} %|{bar}| {elapsed}, {remaining} left"
    with _second_process(has_float64), tqdm(
        total=sum(parts.values()), desc="compiling loops", bar_format=form, leave=False,
        disable=None if progress else True,
    ) as bar:  # fmt: skip
        for part, share in parts.items():
            part()
            bar.update(share)


def compile_from_the_end(has_float64: bool) -> None:
    """Compile the loops, last part first: what another process has kept takes a moment."""
    for part in reversed(_parts(has_float64)):
        part()


@contextmanager
def _second_process(has_float64: bool) -> Iterator[None]:
    """While it lasts, another process compiles from the end, where there is a second core. What it
    does not bring to the disk in time is compiled here."""
    if (os.cpu_count() or 1) < 2:
        yield
        return
    code = f"import {__name__} as loops; loops.compile_from_the_end({has_float64})"
    silent = subprocess.DEVNULL
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent) as other:
        try:
            yield
        finally:
            other.kill()


def _parts(has_float64: bool) -> dict[Callable[[], None], float]:
    """What is compiled, with the CPU seconds that each took on a Xeon (2026-11-28)."""
    import torch

    from megatron_async.ops.cpu import step_kernels
    from megatron_async.ops.recurrent.cpu import host_recurrent
    from megatron_async.ops.sampling.cpu import host_sampling

    parts: dict[Callable[[], None], float] = {
        _compile_rows: 1.4,
        _compile_attention: 2.2,
        step_kernels.compile_loops: 2.6,
        host_sampling.compile_loops: 5.6,
    }
    for dtype in (torch.float32, torch.float64)[: 1 + has_float64]:
        parts[partial(host_recurrent.compile_loops, dtype)] = 5.2
        parts[partial(host_recurrent.compile_step_loops, dtype)] = 1.4
    if multiplies_integers():
        from megatron_async.ops.cpu import layer_kernels
        from megatron_async.ops.experts.cpu import expert_loops
        from megatron_async.ops.linear.cpu.helpers import compile_products

        parts[compile_products] = 6.0
        parts[_compile_groups] = 1.8
        parts[layer_kernels.compile_loops] = 4.8
        parts[expert_loops.compile_loops] = 3.0
    return parts


def _compile_groups() -> None:
    """Loops for files of Q4_0, Q4_1 and Q8_0, as the demo's; a file of others compiles its own."""
    from megatron_async.ops.linear.cpu.group_form import FORMS
    from megatron_async.ops.linear.cpu.group_products import loop_of

    for form in FORMS:
        if form.is_half:
            loop_of(form)


def _compile_rows() -> None:
    import numpy as np

    from megatron_async.ops.cpu import row_kernels

    one, numbers = np.float32(1), _ones(32)
    row = numbers.ctypes.data
    row_kernels.norm(row, row, 1, 4, one, row)
    row_kernels.add_norm(row, row, row, 1, 4, one, row, row)
    row_kernels.swiglu(row, 1, 4, row)
    row_kernels.gated_norm(row, 16, row, 16, row, 1, 1, 4, one, row)
    row_kernels.head_norm(row, 16, row, 16, row, 1, 1, 4, one, row)
    row_kernels.halves(_ones(1, 4), _ones(2, 4), _ones(1), one, one, one)
    row_kernels.whole(_ones(2, 4), _ones(1), one)


def _compile_attention() -> None:
    import numpy as np

    from megatron_async.ops.attention.cpu import attention_kernels

    one, place, table = np.float32(1), np.zeros(1, np.int64), np.zeros((1, 1), np.int32)
    qkv, tables, cache = _ones(1, 1, 3, 4), _ones(1, 4), _ones(1, 1, 4)
    attention_kernels.rope_append(
        qkv, tables, tables, place, place, cache, cache, _ones(4), _ones(4), False, one, 1, 0,
        _ones(1, 1, 4),
    )  # fmt: skip
    attention_kernels.decode_attention(
        _ones(1, 1, 4), cache, cache, table, 1, place, 1, 0, 0, one, one, _ones(1), 0, 1,
        _ones(1, 1, 4),
    )  # fmt: skip


def _ones(*shape: int) -> Any:
    import numpy as np

    return np.ones(shape, np.float32)
