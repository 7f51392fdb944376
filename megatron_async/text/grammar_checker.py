"""`GrammarChecker`: a process that shows whether a grammar can be compiled."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import IO, Any

from megatron_async.errors import RequestError
from megatron_async.text import grammar_worker

_EXCERPT = re.compile(r"^ +\d+ \|.*|^ +\^+$|^<non-verbose/>$", re.MULTILINE)
"""Lines of an error that repeat the grammar, or point into it."""
COMMAND = [sys.executable, "-P", str(Path(grammar_worker.__file__))]


class GrammarChecker:
    """Owns one worker process; it is started when there is a first grammar, and again after one
    that was too much for it.

    Args:
        tokenizer: arguments of `grammar_worker.make_tokenizer`.
    """

    def __init__(self, tokenizer: tuple[str, int, list[int]]) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None

    def check(self, source: str, limit_s: float) -> int:
        """Compile a grammar there.

        Args:
            source: the grammar.
            limit_s: seconds of CPU time that it may take.

        Returns:
            bytes that its compiled form takes; 0 where that is unknown.

        Raises:
            RequestError: it does not compile.
            RuntimeError: the process cannot be started.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        answer = self._ask([source, limit_s])
        if answer is None:
            raise RequestError(self._why_it_died(limit_s))
        error, size = answer
        if error:
            raise RequestError(f"structured_output cannot be compiled: {_in_one_line(error)}.")
        return size

    def close(self) -> None:
        """End the process, also in the middle of a grammar."""
        if self._stop is not None:
            self._stop()

    def _start(self) -> None:
        self.close()
        # In a session of its own, Ctrl-C in the terminal does not reach it.
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
            start_new_session=True,
        )  # fmt: skip
        self._stop = weakref.finalize(self, _end, self._process)
        if self._ask(self._tokenizer) is None:
            raise RuntimeError(
                "the process that checks grammars could not be started "
                f"({' '.join(COMMAND)} ended with {self._process.wait()}): its stderr says why."
            )

    def _ask(self, message: Any) -> tuple[str, int] | None:
        """The answer: the error, and bytes; None if the process died of it."""
        assert self._process is not None
        stdin, stdout = _pipes(self._process)
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            return None
        if not line:
            return None
        error, size = json.loads(line)
        return str(error), int(size)

    def _why_it_died(self, limit_s: float) -> str:
        assert self._process is not None
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return (
                f"compiling structured_output took longer than {limit_s:g} s of CPU time: make it "
                "smaller, with shorter repetitions and smaller multipleOf."
            )
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return (
            f"compiling structured_output was too much for the grammar library ({how}; it has "
            f"{grammar_worker.STACK_BYTES >> 20} MiB of stack and "
            f"{grammar_worker.MEMORY_LIMIT >> 30} GiB of memory): nest it less deeply, chain fewer "
            "references, or make it smaller."
        )


def _in_one_line(error: str) -> str:
    """An error of the library as a sentence, without the lines of the grammar."""
    told = " ".join(_EXCERPT.sub("", error).split())
    # The library's name for the end of a text that has not begun.
    return "it allows no text" if told == "NoExtensionBias" else told


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in _pipes(process):
        try:
            pipe.close()
        except OSError:  # what was not sent cannot be any more
            continue
