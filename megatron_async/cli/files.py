"""Files that options of the command line name, and what is said when one cannot be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GZIP = b"\x1f\x8b"


def read_text(option: str, file: str) -> str:
    """The text of a file.

    Raises:
        ValueError: there is none, or it is not UTF-8; the message names option, file and line.
    """
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{option} {file}: {reason(error)}.") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{option} {file}, line {line}: byte 0x{data[error.start]:02x} is no UTF-8: convert "
            "the file, for example with `iconv -f latin1 -t utf-8`."
        ) from None


def check_readable(option: str, file: str) -> None:
    """Check that a file is there and can be read, before anything long is begun.

    Raises:
        ValueError: it is not.
    """
    path = Path(file)
    why = ""
    if not path.exists():
        why = "no such file or directory"
    elif path.is_dir():
        why = "that is a folder; name a file"
    elif not os.access(path, os.R_OK):
        why = "no permission to read it"
    if why:
        raise ValueError(f"{option} {file}: {why}.")


def check_recording(option: str, file: str) -> None:
    """Check that a file is a recording by its first bytes, before torch is imported for it.

    Raises:
        ValueError: it is not.
    """
    check_readable(option, file)
    with open(file, "rb") as opened:
        if opened.read(len(GZIP)) != GZIP:
            raise ValueError(
                f"{option} {file}: that is no recording: they are written by "
                "`megatron-async generate --record FILE`."
            )


def check_writable(option: str, file: str) -> None:
    """Check that a file can be written, before anything long is begun.

    Raises:
        ValueError: it could not; nothing is made or changed.
    """
    path = Path(file)
    why = ""
    if path.is_dir():
        why = "that is a folder; name a file in it"
    elif not path.parent.is_dir():
        why = "there is no such folder; make it"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it cannot be written (no permission, or a read-only disk); name another place"
    if why:
        raise ValueError(f"{option} {file}: {why}.")


def check_folder(option: str, folder: str | Path) -> None:
    """Check that a folder can be made, by making it, before anything long is begun.

    Raises:
        ValueError: it cannot; nothing is left behind.
    """
    path = Path(folder).absolute()
    missing = [each for each in (path, *path.parents) if not each.exists()]
    try:
        for each in reversed(missing):
            each.mkdir()
        for each in missing:
            each.rmdir()
    except OSError as error:
        raise ValueError(f"{option} {folder}: cannot be made ({reason(error)}).") from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {folder}: cannot be written (no permission).")


@contextmanager
def written_as(name: str) -> Iterator[None]:
    """Give what the block writes a name, for errors that have none: `BrokenPipeError` stays one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = name
        raise


def reason(error: OSError) -> str:
    """What the system says, without its number."""
    return (error.strerror or str(error) or type(error).__name__).lower()
