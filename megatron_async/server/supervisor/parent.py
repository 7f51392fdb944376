"""A child process that ends when its parent does, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
"""Option of Linux' prctl(2): the signal that a process gets when its parent thread ends."""


def end_with_parent(parent: int, pipe: int | None, number: int = signal.SIGKILL) -> None:
    """Let this process get a signal when its parent is gone.

    On Linux the kernel sends it, even to a process that hangs. Elsewhere, and behind a wrapper that
    is not the parent itself, a thread waits for the end of a pipe that only the parent holds.
    `pipe` is the end that is read, nobody writes to the other; `number` is SIGKILL, or SIGTERM for
    a process that has children of its own to end."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        os.kill(os.getpid(), number)
    if pipe is not None:
        os.set_inheritable(pipe, False)  # it is no business of this process' own children
        threading.Thread(
            target=_watch, args=(pipe, number), name="parent-watch", daemon=True
        ).start()


def _watch(pipe: int, number: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), number)
