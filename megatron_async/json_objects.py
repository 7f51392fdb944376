"""JSON objects in the files of models: read with a limit, and with an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_async.errors import ConfigurationError

MIB = 1 << 20
LARGEST_JSON = 64 * MIB
"""Bytes of a JSON file: published ones have up to 10 MiB (the index of a large mixture of
experts)."""


def read_text(path: Path, error: type[ConfigurationError], largest: int = LARGEST_JSON) -> str:
    """The text of a small file.

    Args:
        path: of the file.
        error: what is raised.
        largest: bytes; no more than these are read.

    Raises:
        ConfigurationError: of the class `error`: the file is missing, unreadable, too large, or
            not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
        if len(data) > largest:
            raise error(
                f"{path}: is larger than {largest // MIB} MiB, so it is no file of this kind; "
                "fetch it again"
            )
        return data.decode("utf-8")
    except FileNotFoundError as missing:
        raise error(f"{path}: no such file") from missing
    except OSError as failure:
        raise error(f"{path}: cannot be read ({failure})") from failure
    except UnicodeDecodeError as failure:
        raise error(f"{path}: not readable as UTF-8 ({failure})") from failure


def read_object(path: Path, error: type[ConfigurationError]) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: of the file.
        error: what is raised.

    Raises:
        ConfigurationError: of the class `error`: see `read_text`; or the file is not JSON, nested
            too deeply, or holds something else than an object.
    """
    text = read_text(path, error)
    try:
        value = json.loads(text)
    except RecursionError as failure:
        raise error(f"{path}: not readable as JSON (its values are nested too deeply)") from failure
    except ValueError as failure:
        raise error(f"{path}: not readable as JSON ({failure})") from failure
    if not isinstance(value, dict):
        raise error(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
