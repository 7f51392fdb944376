"""`HeldInterrupts`: Ctrl-C takes effect where nothing is half done.

Python calls the handler of a signal on the main thread, between any two bytecodes, and the usual
handler of SIGINT raises KeyboardInterrupt there. While interrupts are held another handler is
installed, which notes the signal; the program's own one is called at the end. So whatever that does
(raise, cancel the main task as `asyncio.run` has it, set a flag), it does it there. Handlers of an
event loop (`add_signal_handler`) are told by the interpreter's wake-up descriptor, as ever.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import sys
import threading
from collections.abc import Callable
from signal import SIGINT
from threading import get_ident
from types import FrameType
from typing import Any

# The functions under those of `signal`, which make enumerations of what they return. That takes
# 5 microseconds for two calls in each part of a step; these take 0.4.
getsignal, signal = _signal.getsignal, _signal.signal


class _Main:
    """The main thread. To ask `threading` for it and for the current one takes a microsecond."""

    ident = threading.main_thread().ident

    @classmethod
    def is_this_thread(cls) -> None:
        """In a forked process, the only one is."""
        cls.ident = get_ident()


os.register_at_fork(after_in_child=_Main.is_this_thread)


class HeldInterrupts:
    """Holds SIGINT back between `begin` and `end`; `with` it where nothing else is to be done.

    Only on the main thread, as others never see a signal, and only where a Python function handles
    it. A second signal meanwhile takes effect at once: what is done may never end.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        """The program's own; None: nothing is held."""
        self._holder: FrameType | None = None
        self._frame: FrameType | None = None
        """Where the signal came that is due."""
        self._is_due = False
        self._own = self._note

    def begin(self, holder: FrameType) -> None:
        """Hold interrupts back from now on.

        Args:
            holder: the frame that will call `end`.
        """
        if get_ident() != _Main.ident:
            return
        handler = getsignal(SIGINT)
        if callable(handler):
            self._holder = holder
            if handler is not self._own:  # else something has kept the last holder from `end`
                self._handler = handler
                signal(SIGINT, self._own)

    def end(self) -> None:
        """Hold them back no longer: one that came meanwhile takes effect here.

        Raises:
            BaseException: what the program's own handler raises.
        """
        handler = self._handler
        if handler is None or get_ident() != _Main.ident:
            return  # another thread cannot install a handler
        if getsignal(SIGINT) is self._own:  # else the program has installed another one meanwhile
            signal(SIGINT, handler)
        self._handler = self._holder = None
        frame, self._frame = self._frame, None
        if self._is_due:
            self._is_due = False
            handler(SIGINT, frame)

    def __enter__(self) -> None:
        self.begin(sys._getframe(1))

    def __exit__(self, *_: object) -> None:
        self.end()

    def _note(self, number: int, frame: FrameType | None) -> None:
        handler = self._handler
        if handler is None:
            return
        if self._is_due:
            self._is_due = False
            handler(number, self._frame)
            handler(number, frame)
        else:
            self._is_due, self._frame = True, frame
            if self._holder is None or not is_below(self._holder, frame):
                self.end()  # something has kept the holder from it


def is_below(holder: FrameType, caller: FrameType | None) -> bool:
    """Whether `holder` is among the frames that have led to `caller`."""
    while caller is not None and caller is not holder:
        caller = caller.f_back
    return caller is holder
