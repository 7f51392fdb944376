"""Ctrl-C on the command line: an exit in order where there is something to end, and at once before.

While modules are imported and a model is loaded there is nothing to keep, and a KeyboardInterrupt
inside an import would surface anywhere: as a traceback of NumPy's, or not at all.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STATUS = 130
"""128 and the number of SIGINT, as shells have it."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Inside, until `raise_interrupts`, Ctrl-C ends the process with a line and status 130."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored (nohup), or somebody else's
        yield
        return
    try:
        signal.signal(signal.SIGINT, _end)
    except ValueError:  # not the main thread, which gets no signals
        yield
        return
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, before)


def raise_interrupts() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt: something is to be ended in order."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_interrupted() -> None:
    """Say so, on rank 0, in place of a progress bar."""
    print(_line(), file=sys.stderr, end="")


def _line() -> str:
    if os.environ.get("RANK", "0") != "0":
        return ""
    begin = "\r\x1b[K" if sys.stderr.isatty() else "\n"
    return begin + "megatron-async: interrupted\n"


def _end(*_: object) -> None:
    # By the descriptor, and without Python's exit: both may be in the middle of something.
    try:
        os.write(2, _line().encode())
    finally:
        os._exit(STATUS)
