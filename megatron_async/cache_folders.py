"""Where a start keeps what the next start need not make again."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_async.version import __version__

VARIABLE = "MEGATRON_ASYNC_CACHE"
"""Environment: the folder for all kinds, instead of one in the user's cache."""
SERVICE_VARIABLE = "MEGATRON_ASYNC_SERVICE_FOLDER"
"""Environment, as `serve` sets it: a folder of its replicas, which choose what the first one of
them has chosen, also where the cache cannot be written or all measure anew."""


def cache_folder(kind: str) -> Path:
    """The absolute path of a folder of this version; it need not exist.

    Args:
        kind: of the files in it, such as "choices" or "kernels".

    Raises:
        OSError: no folder is named, or one in a home, and there is no such home.
    """
    if named := os.environ.get(VARIABLE):
        home = Path(os.path.expanduser(named))
    else:
        home = Path(os.environ.get("XDG_CACHE_HOME", ""), "megatron_async")
        if not home.is_absolute():  # the XDG specification passes such a value over
            home = Path(os.path.expanduser("~/.cache/megatron_async"))
    if str(home).startswith("~"):
        raise FileNotFoundError(f"{home}: there is no such home; set {VARIABLE} to a folder")
    return home.absolute() / __version__ / kind
