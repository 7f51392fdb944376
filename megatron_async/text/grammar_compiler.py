"""`GrammarCompiler`: grammars of one tokenizer, compiled beside the engine's thread; and
`GrammarChecker`: a process that shows whether a grammar can be compiled.
"""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron_async.errors import RequestError
from megatron_async.interrupts import HeldInterrupts
from megatron_async.text import grammar_worker
from megatron_async.text.grammar_worker import compile_grammar, make_tokenizer
from megatron_async.text.structured_output import StructuredOutput, TokenGrammar

_EXCERPT = re.compile(r"^ +\d+ \|.*|^ +\^+$|^<non-verbose/>$", re.MULTILINE)
"""Lines of an error that repeat the grammar, or point into it."""
COMMAND = [sys.executable, "-P", str(Path(grammar_worker.__file__))]


class GrammarChecker:
    """Owns one worker process, for a tokenizer as `grammar_worker.make_tokenizer` takes it; it is
    started when there is a first grammar, and again after one that was too much for it."""

    def __init__(self, tokenizer: tuple[str, int, list[int]]) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None

    def check(self, source: str, limit_s: float) -> int:
        """Compile a grammar there, in at most so many seconds of CPU time.

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


KEPT_GRAMMARS = 64
"""Grammars that are kept for further requests, compiled, or the errors of bad ones."""
KEPT_BYTES = 256 << 20
"""Bytes of compiled grammars that are kept, but for the newest ones, which requests wait for."""
COMPILE_LIMIT_S = 5.0
"""CPU time that compiling a grammar may take."""
AT_ONCE = 2
"""Grammars that are compiled at the same time: a slow one leaves a place for others."""
STACK_BYTES = 16 << 20
"""Stack of a thread that compiles: more than what the grammar was tried on."""


class CompiledGrammar(NamedTuple):
    """A grammar at its beginning: llguidance's matcher, which is copied, and its bytes; 0 where
    these are unknown."""

    matcher: Any
    size: int


class GrammarCompiler:
    """Compiles each grammar twice, both times beside the engine's thread: in a process that it may
    crash or never end, and, once that has shown that it does neither, here (the compiled form
    cannot be sent). The library lets go of Python's lock meanwhile. It does not while it reads the
    tokenizer, once for an engine, and no other process or thread can do that instead: a server
    calls `prepare` before the first request. `limit_s`: CPU time that a grammar may take."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._described: tuple[str, int, list[int]] | None = None
        self._converted: Any = None
        self._jobs: dict[str, Future[Any]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._checkers: list[GrammarChecker] = []
        self._idle: list[GrammarChecker] = []
        self.limit_s = COMPILE_LIMIT_S

    def prepare(self) -> None:
        """Read the tokenizer now. Otherwise the first grammar does that, and every thread waits for
        it (0.25 s with 49,152 tokens). Where it cannot be read, grammars are refused, later."""
        with contextlib.suppress(Exception):
            self._read_tokenizer()

    def begin(self, wanted: Any) -> Future[Any]:
        """Compile a grammar, unless that has been done. The first one takes a moment, unless
        `prepare` was called.

        Returns:
            a future for `start`; its exception says what is wrong with the grammar.

        Raises:
            RequestError: it is no `StructuredOutput`, or of a wrong type, or too large, or there is
                no tokenizer that llguidance can read.
        """
        if not isinstance(wanted, StructuredOutput):
            raise RequestError(
                f"structured_output={reprlib.repr(wanted)} is not allowed: it must be a "
                "StructuredOutput."
            )
        source = wanted.source()
        job = self._jobs.get(source)
        if job is not None and not _is_worth_another_try(job):
            return job
        described = self._read_tokenizer()
        while len(self._jobs) >= KEPT_GRAMMARS or sum(map(_size, self._jobs.values())) > KEPT_BYTES:
            self._jobs.pop(next(iter(self._jobs)))
        job = self._jobs[source] = self._submit(source, described)
        return job

    def start(self, compiled: CompiledGrammar) -> TokenGrammar:
        """The beginning of a compiled grammar, for one request."""
        return TokenGrammar(compiled.matcher.deep_copy())

    def close(self) -> None:
        """Compile no more."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for checker in self._checkers:
            checker.close()

    def _submit(self, source: str, described: tuple[str, int, list[int]]) -> Future[Any]:
        with HeldInterrupts():  # which would leave locks of all executors locked
            if self._threads is None:
                self._threads = ThreadPoolExecutor(AT_ONCE, "grammar")
            before = threading.stack_size(STACK_BYTES)  # of threads that are started now
            try:
                return self._threads.submit(self._compile, source, described)
            finally:
                threading.stack_size(before)

    def _compile(self, source: str, described: tuple[str, int, list[int]]) -> Any:
        """On a thread of its own."""
        try:
            checker = self._idle.pop()
        except IndexError:
            checker = GrammarChecker(described)
            self._checkers.append(checker)
        try:
            size = checker.check(source, self.limit_s)
        finally:
            self._idle.append(checker)
        compiled = compile_grammar(self._converted, source)
        if compiled.is_error():
            raise RequestError(f"structured_output cannot be compiled: {compiled.get_error()}")
        return CompiledGrammar(compiled, size)

    def _read_tokenizer(self) -> tuple[str, int, list[int]]:
        """Convert the tokenizer, once; returns its description for the processes that try."""
        if self._described is None:
            described = self._describe_tokenizer()
            self._converted = make_tokenizer(*described)
            self._described = described
        return self._described

    def _describe_tokenizer(self) -> tuple[str, int, list[int]]:
        backend = getattr(self._tokenizer, "backend", None)
        if backend is None or getattr(self._tokenizer, "eod", None) is None:
            raise RequestError(
                "structured_output needs a megatron_async Tokenizer with an end-of-sequence "
                f"token, but this engine has {type(self._tokenizer).__name__}: give the model "
                "its tokenizer folder."
            )
        ends = list(self._tokenizer.eos_ids) or [self._tokenizer.eod]
        return backend.to_str(), self._vocab_size, ends


def _size(job: Future[Any]) -> int:
    if not job.done() or job.cancelled() or job.exception() is not None:
        return 0
    return int(job.result().size)


def _is_worth_another_try(job: Future[Any]) -> bool:
    """Whether a grammar failed for no fault of its own."""
    if not job.done():
        return False
    return job.cancelled() or not isinstance(job.exception(), RequestError | None)
