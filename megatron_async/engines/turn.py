"""`Turn`: a change of an engine's books that is done as a whole, or made good."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, TracebackType

from megatron_async.errors import JobFailed
from megatron_async.interrupts import HeldInterrupts, is_below


class Turn:
    """`with` it around everything that changes an engine's books: the launch of a step, its
    booking, an admission. It never contains a wait for the device.

    Ctrl-C takes effect at its end. Whatever else leaves it in the middle, at any bytecode (a
    MemoryError, the SystemExit of somebody's callback, a handler of another signal that raises, a
    second Ctrl-C), leaves books of which nobody knows how far they are written. They are mended
    before anything goes on: at once, or, if that is cut short too, when the next turn begins.

    Args:
        mend: makes the books whole, after this error. It may be called again if it raises.
    """

    def __init__(self, mend: Callable[[BaseException], None]) -> None:
        self._mend = mend
        self._interrupts = HeldInterrupts()
        self._opener: FrameType | None = None
        """Whose `with` it is: a turn within a turn is a part of it."""
        self._is_whole = True
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        caller = sys._getframe(1)
        if self._opener is not None and is_below(self._opener, caller):
            return
        try:
            self._opener = caller
            self._interrupts.begin(caller)
            if not self._is_whole:
                self._make_whole()
            self._is_whole = False
        except BaseException:
            self._opener = None
            self._interrupts.end()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._opener is not sys._getframe(1):
            return
        try:
            if error is None or isinstance(error, JobFailed):  # for which all requests fail
                self._is_whole = True
            else:
                self._error = error
                self._make_whole()
        finally:
            self._opener = None
            self._interrupts.end()

    def make_whole(self) -> None:
        """Mend books that could not be mended when something had cut a turn short."""
        if not self._is_whole:
            with self:
                pass

    def _make_whole(self) -> None:
        self._mend(self._error or KeyboardInterrupt("at a turn's beginning or end"))
        self._error = None
        self._is_whole = True
