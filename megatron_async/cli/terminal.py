"""What a terminal needs of a program that talks: words that are not cut at its edge, keys that are
not shown while it speaks, a line at once where the first seconds show nothing, and Ctrl-C.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STATUS = 130
"""128 and the number of SIGINT, as shells have it."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Inside, until `raise_interrupts`, Ctrl-C ends the process with a line and status 130."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored (nohup), or another library's
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


STARTING = "starting: torch and Megatron-Core are being imported ..."
MOST_HELD = 200
"""A longer word is printed as it comes: an address, or text that is no prose."""


class WordWrap:
    """Passes a text on as it comes, with line breaks between words at the terminal's edge.

    A word is held back until it has ended. Letters that are two columns wide (Chinese, Japanese,
    Korean) may be parted anywhere.

    Args:
        write: takes the text.
        columns: of the terminal, asked for each piece, as its window may change.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        self._write = write
        self._columns = columns
        self._at = 0
        self._blank = ""
        """Between the line so far and the word; dropped where the line is broken."""
        self._word = ""
        self._goes_on = False
        """What comes next belongs to the long word before it."""

    def show(self, text: str) -> None:
        """Print what is certain of a text's next piece."""
        columns, out = max(self._columns(), 2), []
        for letter in text:
            if letter == "\n":
                out.append(self._ended(columns) + "\n")
                self._at, self._blank = 0, ""
            elif letter.isspace():
                out.append(self._ended(columns))
                self._blank += letter
            else:
                if _width(letter) == 2:
                    out.append(self._ended(columns))
                self._word += letter
                if len(self._word) >= MOST_HELD:
                    out.append(self._ended(columns))
                    self._goes_on = True
        self._write("".join(out))

    def end(self) -> None:
        """Print what was held back."""
        self._write(self._ended(max(self._columns(), 2)))
        self._at, self._blank = 0, ""

    def _ended(self, columns: int) -> str:
        """The word that ends here, behind its blanks or on a new line."""
        if not self._word:
            return ""
        wide = sum(map(_width, self._word))
        between = self._blank
        if self._at and not self._goes_on and self._at + len(between) + wide >= columns:
            between, self._at = "\n", 0
        else:
            self._at += len(between)
        text = between + self._word
        self._at += wide
        self._word, self._blank, self._goes_on = "", "", False
        return text


def _width(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


@contextmanager
def unseen_keys() -> Iterator[None]:
    """Inside, keys that are typed into the terminal are not shown, and they are forgotten at the
    end: they would stand in the middle of an answer. Ctrl-C is one no less."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (ImportError, ValueError, OSError, termios.error):  # no terminal, or Windows
        yield
        return
    quiet = termios.tcgetattr(terminal)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        # TCSAFLUSH forgets what was typed.
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


@contextmanager
def importing_engine(says: bool = True) -> Iterator[None]:
    """Around the import of torch and Megatron-Core: a line stands on stderr, if that is a terminal
    and `says`: replicas of `serve` have its terminal, where it writes meanwhile.

    The garbage collector waits, and never looks at what was imported: by then it would have scanned
    400,000 objects, which all stay, several times (a fifth of the start of a small model).
    """
    is_told = says and sys.stderr.isatty()
    if is_told:
        print(STARTING, end="", file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if is_told:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
