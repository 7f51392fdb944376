"""`njit`: Numba's, whose compiled loops are kept on disk where the disk takes them.

Numba's own cache lets a call fail when its folder is full, or is taken away. But what is kept there
only saves time: a loop that cannot be kept is compiled again by the next process.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

logger = logging.getLogger("megatron_async")

_told: list[str] = []


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: a function is compiled at its first call.

    Args:
        cache: keep the machine code on disk; a disk that does not take it costs time alone.
        options: of `numba.njit`.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        loop = numba.njit(**options)(function)
        if cache:
            try:
                loop._cache = _ForgivingCache(function)
            except (RuntimeError, OSError) as error:  # Numba has found no folder at all
                _tell("", error)
        return loop

    return compiled


def is_kept(loop: Any) -> bool:
    """Whether machine code of a loop, which `njit` made with `cache`, lies on the disk."""
    cache = loop._cache
    if not isinstance(cache, _ForgivingCache):
        return False
    return any(Path(cache.cache_path).glob(f"{cache._impl.filename_base}*.nbc"))


class _ForgivingCache(FunctionCache):
    """Numba's cache of one function; what the disk refuses is compiled again."""

    @contextlib.contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:
        # Numba's own place for errors that are to be passed over, around each access.
        try:
            yield
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _tell(self.cache_path, error)


def _tell(folder: str, error: Exception) -> None:
    """Warn once: Numba has a folder below its own for each of these packages."""
    if _told:
        return
    _told.append(folder)
    logger.warning(
        "Compiled loops cannot be kept%s (%s): each process compiles them again, half a minute; "
        "make room there, or set NUMBA_CACHE_DIR to a folder that can be written.",
        f" in {folder}" if folder else "", error,
    )  # fmt: skip
