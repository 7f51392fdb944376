"""`OwnFolder`: a folder for sockets and stores that no other user of the host may reach."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from megatron_async.errors import ConfigurationError

FOLDER_VARIABLE = "MEGATRON_ASYNC_RANKS_FOLDER"
"""Environment of the ranks of one host: the folder in which they meet, without any port.
`LocalRanks` sets it."""

PREFIX = "megatron-async-run-"
LOCK = "lock"
ATTEMPTS = 10
"""Tries: another process may take a new folder for a left one, before its owner has locked it."""


class OwnFolder:
    """A folder of mode 0700 among temporary files, which is removed at the end. A context manager.

    Its owner holds a lock on a file in it, which the kernel gives back however a process ends. So
    the maker of the next one can tell folders in use from those that were left: by
    process numbers it cannot, where containers share the folder for temporary files.

    Attributes:
        path: where it is.

    Raises:
        ConfigurationError: no folder can be made.
    """

    def __init__(self) -> None:
        try:
            parent = Path(tempfile.gettempdir())
            remove_left_folders(parent)
            self.path, self._lock = _make_locked()
        except OSError as error:
            raise ConfigurationError(
                f"no folder for temporary files can be made ({error}): set TMPDIR to a folder that "
                "this user may write to, on a disk that is not full."
            ) from error

    def close(self) -> None:
        """Remove it. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> OwnFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_left_folders(parent: Path) -> None:
    """Remove this user's folders whose owners were killed: those whose lock nobody holds."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, another user's, a link, or none of ours
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)  # raises for a link
            finally:
                os.close(lock)


def is_private(folder: Path) -> bool:
    """Whether a folder is this user's, and closed to all others but root."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return folder.is_dir() and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _make_locked() -> tuple[Path, int]:
    for _ in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: nobody can lock it, so nobody removes it
            (folder / LOCK).unlink(missing_ok=True)
            return folder, lock
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
                return folder, lock
        os.close(lock)
    raise OSError(errno.EBUSY, "other processes remove each new folder", tempfile.gettempdir())
