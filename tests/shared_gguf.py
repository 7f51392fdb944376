"""The demo model's GGUF file is read once by a process: its 98,000 strings take two seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_async.checkpoints import gguf

LARGE = 50_000_000
"""Bytes; the files that tests write are smaller, and some of them are damaged on purpose."""


def share_readers() -> None:
    """For all of this process."""
    read, known = gguf._PlainReader, dict[tuple[Any, ...], Any]()

    def shared(file: Path, mode: str) -> Any:
        status = file.stat()
        if status.st_size < LARGE:
            return read(file, mode)
        key = file.resolve(), status.st_mtime_ns, status.st_size, mode
        if key not in known:
            known[key] = read(file, mode)
        return known[key]

    gguf._PlainReader = shared  # type: ignore[assignment, misc]
