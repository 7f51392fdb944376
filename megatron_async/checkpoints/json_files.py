"""JSON objects in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: missing, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_size(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A positive integer of a JSON object.

    Args:
        config: the object.
        key: name of the value.
        where: file name for error messages.
        default: what null or a missing value mean; None: they are errors.

    Raises:
        CheckpointError: it is something else.
    """
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"{where}: {key} = {value!r} must be a positive integer")
    return value


def read_number(
    config: dict[str, Any], key: str, where: str, default: float | None = None
) -> float:
    """A positive number of a JSON object; the arguments are those of `read_size`.

    Raises:
        CheckpointError: it is something else.
    """
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"{where}: {key} = {value!r} must be a positive number")
    return float(value)
