"""Whether Numba compiles loops here."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SWITCH = "MEGATRON_ASYNC_CPU_KERNELS"
"""Environment variable: "torch" keeps to the references in plain torch."""


@cache
def compiles() -> bool:
    """Whether loops serve the CPU: Numba is installed, and nobody forbids it.

    Raises:
        ValueError: the environment variable has another value than "torch" or "numba".
    """
    wanted = os.environ.get(SWITCH, "numba")
    if wanted not in ("numba", "torch"):
        raise ValueError(f"{SWITCH}={wanted!r} is unknown: use 'numba' or 'torch', or unset it.")
    if wanted != "numba" or find_spec("numba") is None:
        return False
    home = Path(__file__).parent
    forget_stale_loops(home, *sorted(home.parent.glob("*/cpu")))
    return True


def forget_stale_loops(*folders: Path) -> None:
    """Remove what Numba keeps beside the sources of some folders, and of folders in them, if it is
    of other sources.

    Numba looks at the date of a function's own file alone. So it would go on with machine code that
    has functions of another file in it as they were.
    """
    sources, kept = hashlib.sha256(), folders[0] / "__pycache__"
    for source in (source for folder in folders for source in sorted(folder.rglob("*.py"))):
        sources.update(source.read_bytes())
    stamp = kept / "loops.sha256"
    # Beside sources that nobody may write to, Numba keeps nothing: it has its own folder for each
    # user then. Such an installation is replaced as a whole, and so the dates of all its files.
    with suppress(OSError):
        if stamp.exists() and stamp.read_text() == sources.hexdigest():
            return
        for stale in (code for each in folders for code in each.rglob("__pycache__/*.nb[ic]")):
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
