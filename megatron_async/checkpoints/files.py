"""JSON objects and names in files, and folders to write to. This module does not import torch."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.json_objects import read_object
from megatron_async.models.largest_sizes import size_problem


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: missing, too large, not JSON, or not an object.
    """
    return read_object(path, CheckpointError)


def check_size(value: Any, key: str, where: str) -> int:
    """A size that was read from a file.

    Args:
        value: as it was read.
        key: its name in the file.
        where: file name for error messages.

    Raises:
        CheckpointError: no positive integer, or larger than any model's.
    """
    problem = size_problem(key, value)
    if problem:
        raise CheckpointError(f"{where}: {key} = {value!r:.200} {problem}")
    return int(value)


def check_number(value: Any, key: str, where: str) -> float:
    """A positive finite number that was read from a file; the arguments are those of `check_size`.

    Raises:
        CheckpointError: it is something else.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise CheckpointError(f"{where}: {key} = {value!r:.200} must be a positive number")
    return float(value)


def is_inside(name: str) -> bool:
    """Whether a name in a file names a file in the same folder or below. Where that file is a
    link, as in Hugging Face's cache, is the owner's choice and not the file's."""
    if not name or "\0" in name:
        return False
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not any(path.is_absolute() or path.drive or ".." in path.parts for path in paths)


OF_MODELS = ("config.json", "metadata.json")
"""A folder with one of these files holds a model (of Hugging Face, or a torch_dist checkpoint)."""


def check_target(target: Path, overwrite: bool) -> None:
    """Check that a model may be written to a folder.

    Raises:
        CheckpointError: a file; a folder that is not empty, without `overwrite`; or one that holds
            something other than a model.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; name a folder to write to")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"{target}: is not empty; choose another folder, or ask to overwrite it (--overwrite)"
        )
    if not any((target / name).is_file() for name in OF_MODELS):
        raise CheckpointError(f"{target}: holds something other than a model; not overwritten")
