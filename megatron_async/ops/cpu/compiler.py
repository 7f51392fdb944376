"""Whether Numba compiles loops here, and how."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

logger = logging.getLogger("megatron_async")

SWITCH = "MEGATRON_ASYNC_CPU_KERNELS"
"""Environment variable: "torch" keeps to the references in plain torch."""


@cache
def compiles() -> bool:
    """Whether the loops of this folder serve the CPU: Numba is installed, and nobody forbids it.

    Raises:
        ValueError: the environment variable has another value than "torch" or "numba".
    """
    wanted = os.environ.get(SWITCH, "numba")
    if wanted not in ("numba", "torch"):
        raise ValueError(f"{SWITCH}={wanted!r} is unknown: use 'numba' or 'torch', or unset it.")
    if wanted != "numba" or find_spec("numba") is None:
        return False
    forget_stale_loops(Path(__file__).parent)
    return True


def forget_stale_loops(folder: Path) -> None:
    """Remove what Numba keeps beside the sources of `folder`, and of folders in it, if it is of
    other sources.

    Numba looks at the date of a function's own file alone. So it would go on with machine code that
    has functions of another file in it as they were.
    """
    sources, kept = hashlib.sha256(), folder / "__pycache__"
    for source in sorted(folder.rglob("*.py")):
        sources.update(source.read_bytes())
    stamp = kept / "loops.sha256"
    # Beside sources that nobody may write to, Numba keeps nothing: it has its own folder for each
    # user then. Such an installation is replaced as a whole, and so the dates of all its files.
    with suppress(OSError):
        if stamp.exists() and stamp.read_text() == sources.hexdigest():
            return
        for stale in folder.rglob("__pycache__/*.nb[ic]"):
            stale.unlink(missing_ok=True)
        kept.mkdir(exist_ok=True)
        stamp.write_text(sources.hexdigest())


@cache
def multiplies_integers() -> bool:
    """Whether `integer_products.py` serves this CPU: loops are compiled, for an x86 CPU with AVX2.

    Numba's own settings of another CPU forbid it: LLVM ends the process at an instruction that the
    CPU it compiles for does not have.
    """
    if not compiles():
        return False
    import llvmlite.binding as llvm
    from numba import config

    is_own = not config.CPU_NAME and not config.CPU_FEATURES
    return is_own and bool(llvm.get_host_cpu_features().get("avx2", False))


def compile_missing(progress: bool = False) -> None:
    """Compile the loops if they do not lie on the disk, where none fits or this is the first time:
    in a step they would take so long that its replica would count as lost.

    Args:
        progress: show a bar on stderr, if that is a terminal.
    """
    if not compiles():
        return
    from megatron_async.ops.cpu import attention_kernels, row_kernels, step_kernels
    from megatron_async.ops.cpu.kept_loops import is_kept
    from megatron_async.ops.cpu.sampling import sampling_kernels

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
        has_float64: those of float64 too, which tests use.
        progress: show a bar on stderr, if that is a terminal.
    """
    if not compiles():
        return
    from tqdm import tqdm

    parts = _parts(has_float64)
    form = "{desc}: {percentage:3.0f} %|{bar}| {elapsed}, {remaining} left"
    with tqdm(total=sum(parts.values()), desc="compiling loops", bar_format=form, leave=False,
              disable=None if progress else True) as bar:  # fmt: skip
        for part, share in parts.items():
            part()
            bar.update(share)


def _parts(has_float64: bool) -> dict[Callable[[], None], float]:
    """What is compiled, with the CPU seconds that each took on a Xeon (2026-11-28)."""
    import torch

    from megatron_async.ops.cpu import step_kernels
    from megatron_async.ops.cpu.recurrent import host_flush, host_recurrent
    from megatron_async.ops.cpu.sampling import host_sampling

    parts: dict[Callable[[], None], float] = {
        _compile_rows: 1.4,
        _compile_attention: 2.2,
        step_kernels.compile_loops: 2.6,
        host_sampling.compile_loops: 5.6,
    }
    for dtype in (torch.float32, torch.float64)[: 1 + has_float64]:
        parts[partial(host_recurrent.compile_loops, dtype)] = 5.2
        parts[partial(host_flush.compile_loops, dtype)] = 1.4
    if multiplies_integers():
        from megatron_async.ops.cpu import layer_kernels
        from megatron_async.ops.cpu.products.helpers import compile_products

        parts[compile_products] = 9.7
        parts[layer_kernels.compile_loops] = 4.8
    return parts


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

    from megatron_async.ops.cpu import attention_kernels

    one, place, table = np.float32(1), np.zeros(1, np.int64), np.zeros((1, 1), np.int32)
    qkv, tables, cache = _ones(1, 1, 3, 4), _ones(1, 4), _ones(1, 1, 4)
    attention_kernels.rope_append(
        qkv, tables, tables, place, place, cache, cache, _ones(4), _ones(4), False, one, 1, 0,
        _ones(1, 1, 4),
    )  # fmt: skip
    attention_kernels.decode_attention(
        _ones(1, 1, 4), cache, cache, table, 1, place, 1, 0, one, 0, 1, _ones(1, 1, 4)
    )


def _ones(*shape: int) -> Any:
    import numpy as np

    return np.ones(shape, np.float32)
