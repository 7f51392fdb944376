"""Where a start keeps what the next start need not make again."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_async.version import __version__

VARIABLE = "MEGATRON_ASYNC_CACHE"
"""Environment: the folder for all kinds, instead of one in the user's cache."""


def cache_folder(kind: str) -> Path:
    """The absolute path of a folder of this version; it need not exist.

    Args:
        kind: of the files in it, such as "choices" or "kernels".

    Raises:
        OSError: no folder is named, and the user has no home.
    """
    if named := os.environ.get(VARIABLE):
        home = Path(named).expanduser().absolute()
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not cache.is_absolute():  # the XDG specification passes such a value over
            cache = Path(os.path.expanduser("~/.cache"))
        if not cache.is_absolute():
            raise FileNotFoundError(f"this user has no home: set {VARIABLE} to a folder")
        home = cache / "megatron_async"
    return home / __version__ / kind
