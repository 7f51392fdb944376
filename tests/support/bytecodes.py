"""Do something between two given bytecodes of the package, as a signal or a failure may come."""

from __future__ import annotations

import concurrent.futures
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import megatron_async

PACKAGE = f"{Path(megatron_async.__file__).parent}/"
LOCKING = threading.__file__, concurrent.futures._base.__file__
"""Modules of Python that lock, in Python."""


class AtBytecode:
    """`with` it: before the given bytecode (from 1) of the package (or of `LOCKING`) that this
    thread runs within, `act` is called, once at most; what it raises is raised there. The bytecodes
    of `spared` functions do not count. `where` is file, line and function of the bytecode; None:
    there are fewer."""

    def __init__(
        self, number: int, act: Callable[[], None], spared: tuple[CodeType, ...] = ()
    ) -> None:
        self._left = number
        self._act = act
        self._spared = spared
        self.where: tuple[str, int, str] | None = None

    def __enter__(self) -> AtBytecode:
        self._before = sys.gettrace()
        # Python 3.12 looks for bytecodes only where a frame has asked before `settrace`.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._called)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith((PACKAGE, *LOCKING)) or code in self._spared:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._at

    def _at(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and self.where is None:
            self._left -= 1
            if not self._left:
                code = frame.f_code
                self.where = code.co_filename.removeprefix(PACKAGE), frame.f_lineno, code.co_name
                sys.settrace(self._before)
                self._act()
        return None if self.where else self._at


def ctrl_c() -> None:
    """The signal, as a terminal sends it."""
    signal.raise_signal(signal.SIGINT)


def interrupt() -> None:
    """What no signal handler of ours holds back."""
    raise KeyboardInterrupt
