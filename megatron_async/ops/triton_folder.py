"""Where Triton keeps compiled kernels: the folder that the user names to Triton, else ours of this
version, or another where that one takes nothing."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from megatron_async.cache_folders import cache_folder
from megatron_async.errors import ConfigurationError

logger = logging.getLogger("megatron_async")

VARIABLE = "TRITON_CACHE_DIR"
PROBE = bytes(1 << 16)
"""Is written to see whether a folder takes files: a full disk takes empty ones too."""


@cache
def choose_triton_folder() -> bool:
    """Let Triton have our folder, or one of this process where no other can be written: with what
    the other one has, as an image's folder may be another user's.

    Returns:
        whether kernels are kept.

    Raises:
        ConfigurationError: nor can the folder for temporary files.
    """
    from triton import knobs

    if not {VARIABLE, "TRITON_HOME"} & os.environ.keys():
        with suppress(OSError):  # a user without a home
            knobs.cache.dir = str(cache_folder("kernels"))
    folder = knobs.cache.dir
    try:
        os.makedirs(folder, exist_ok=True)
        _write_to(folder)
    except OSError as error:
        try:
            own = tempfile.mkdtemp(prefix="megatron-async-triton-")
            atexit.register(shutil.rmtree, own, ignore_errors=True)
            _write_to(own)
            _link(Path(folder).absolute(), own)
        except OSError as second:
            raise ConfigurationError(
                f"compiled kernels can be written neither to {folder} ({error}) nor to a temporary "
                f"folder ({second}): set {VARIABLE} to a folder that can be written."
            ) from second
        logger.warning(
            "Compiled kernels cannot be kept in %s (%s): each process compiles again what is not "
            "there; make room, or set %s to a folder that can be written.", folder, error, VARIABLE,
        )  # fmt: skip
        knobs.cache.dir = own
        return False
    return True


def _link(folder: Path, own: str) -> None:
    # Files alone: a folder of links could not be written either.
    with suppress(OSError):
        for file in folder.glob("*/*"):
            if file.is_file():
                there = Path(own, file.parent.name)
                there.mkdir(exist_ok=True)
                there.joinpath(file.name).symlink_to(file)


def _write_to(folder: str) -> None:
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(PROBE)
        probe.flush()
        os.fsync(probe.fileno())
