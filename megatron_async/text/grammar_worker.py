"""Compile a grammar; as a program, in a process that may crash or be killed without harm.

The program imports llguidance and Python's own modules only. It reads JSON lines: first a
tokenizer, then grammars; and answers each with the error ("": there is none), and with the bytes
that the compiled form takes. A grammar that is
too much for it ends it by a signal, which its parent can tell (`text/grammar_compiler.py`). It ends
itself, so that none is left behind when the parent is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
from typing import Any

MEMORY_LIMIT = 4 << 30
"""Bytes of address space that compiling may take."""
STACK_BYTES = 6 << 20
"""The stack on which a grammar is tried: less than the 8 MiB on which an engine usually runs, and
than the 16 MiB on which it compiles what was tried here."""
MAX_LEXER_STATES = 50_000
"""States that the lexer of one request may have, at 1 to 2 kB each."""

MAX_ITEMS = 4000
"""What a grammar may follow at once, in the library's items: enough for `grammar_limits.MAX_WIDTH`
(6 items for an alternative that is a list, 4 for an optional property)."""


def make_tokenizer(text: str, vocab_size: int, ends: list[int]) -> Any:
    """The tokenizer of llguidance (of a `tokenizer.json`, columns of the logits, tokens that end a
    text), which holds Python's lock for all of it: of 0.22 s for 49,152 tokens two thirds are the
    file and the trie, and a third the slices that make masks fast."""
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends if len(ends) > 1 else ends[0])


def compile_grammar(tokenizer: Any, source: str) -> Any:
    """A matcher at the beginning of a grammar; `get_error()` says what is wrong with it.

    Its first mask has been computed, so that its copies find the lexer's states made: the first
    mask of an object with 1000 properties takes 0.05 ms then, not 7 ms. Python's lock is not held.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, max_items_in_row=MAX_ITEMS, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error() and not matcher.is_stopped():
        matcher.compute_bitmask()
    return matcher


class _HeapNumbers(ctypes.Structure):
    """glibc's `struct mallinfo2` (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def heap_bytes() -> int:
    """Bytes that this process has from malloc; 0 where the C library cannot tell."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _HeapNumbers
    numbers = ask()
    return int(numbers.uordblks + numbers.hblkhd)


def main() -> None:
    """Serve a parent, until it closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError):  # a system without it, or a lower limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = make_tokenizer(*json.loads(sys.stdin.readline()))
    _answer(answers, "", 0)
    for line in sys.stdin:
        source, limit_s = json.loads(line)
        found: list[Any] = []
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=lambda: found.extend(_tried(tokenizer, source)))  # noqa: B023
        # The kernel ends this process when the time is up, whatever it is in.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answers, *found)


def _tried(tokenizer: Any, source: str) -> tuple[str, int]:
    before = heap_bytes()
    try:
        matcher = compile_grammar(tokenizer, source)
        return str(matcher.get_error()), max(heap_bytes() - before, 0)
    except Exception as failure:
        return str(failure) or repr(failure), 0


def _answer(answers: Any, error: str, size: int) -> None:
    answers.write(json.dumps([error, size]) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
