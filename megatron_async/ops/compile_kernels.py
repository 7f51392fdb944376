"""Triton's kernels are compiled by processes of their own, on all cores, while weights load.

`KernelStart` is the side of the process that starts an engine. The other side is `main`: it finds
the engine's kernels without a GPU, then forks workers, which take one kernel after another and
leave what they made in Triton's cache. What is kept of a program is which entries of that cache it
needs, so nothing that is read from a file reaches a compiler.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils, libcuda_dirs
from triton.compiler import ASTSource
from triton.compiler.compiler import get_cache_invalidating_env_vars

import megatron_async.ops.triton_run  # noqa: F401  # kernels have one key in every process
from megatron_async.communication.rendezvous import VARIABLES

logger = logging.getLogger("megatron_async")

DERIVE = "megatron_async.lab.absent_gpu"
"""Module that finds a program's kernels without a GPU: by name, as its room stands beside the
engine."""
PACKAGE_PARENT = str(Path(__file__).parents[2])
NO_LAUNCHER = contextlib.suppress(
    ImportError, OSError, RuntimeError, AssertionError, subprocess.SubprocessError
)
"""What building a module of C raises where there is no compiler for it, or no libcuda to load."""
STALL_S = 180.0
"""Seconds without a word of the child after which nobody waits any longer. The slowest kernels take
10."""
SLOWEST = "warpgroup_attention_kernel", "long_row_kernel", "_bounds", "_schedule_kernel"
"""Kernels that take longest to compile, of those of the 8B shape."""
KEY = re.compile("[A-Z2-7]{52}")
"""A folder of Triton's cache, for one kernel."""
MOST_BYTES = 1 << 20
LONGEST_LINE = 1 << 12

Kernel = tuple[ASTSource, dict[str, Any]]
"""What `triton.compile` takes: a source and options."""


class KernelStart:
    """The kernels of an engine that starts: what is missing is compiled beside, until the end of a
    `with` block.

    Args:
        program: what the kernels depend on (`lab/absent_gpu.py` reads it), as JSON has it.
        workers: processes; None: one for each core but one.

    Attributes:
        folder: of Triton's cache.
        was_kept: whether an earlier start of the program has left all of them.
        keys: of the kernels that are there, as far as is known.
        failures: kernels that could not be compiled, and why; or why nothing could be.
        total: kernels of the program; None: not known yet.
    """

    def __init__(self, program: Mapping[str, Any], workers: int | None = None) -> None:
        facts = [triton.__version__, get_cache_invalidating_env_vars(), program]
        text = json.dumps(facts, sort_keys=True, default=str)
        name = blake2b(text.encode(), digest_size=16).hexdigest()
        self.folder = Path(knobs.cache.dir)
        self._file = self.folder / "programs" / name
        kept = self._kept()
        self.was_kept = kept is not None
        self.keys = kept or []
        self.total = None if kept is None else len(kept)
        self.failures: list[str] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if not self.was_kept:
            try:
                self._start({"program": program, "workers": workers or max(1, cores() - 1)})
            except OSError as error:
                self.failures.append(str(error))

    def _kept(self) -> list[str] | None:
        """The keys that an earlier start has noted, if a kernel lies under each of them."""
        try:
            if not self._file.is_file() or self._file.stat().st_size > MOST_BYTES:
                return None
            keys = self._file.read_text().split()
        except (OSError, ValueError):
            return None
        is_there = all(KEY.fullmatch(k) and any((self.folder / k).glob("__grp__*")) for k in keys)
        return keys if is_there else None

    def _start(self, job: dict[str, Any]) -> None:
        self._temporary = tempfile.TemporaryDirectory(
            prefix="megatron-async-compile-", ignore_cleanup_errors=True
        )
        alone = {n: v for n, v in os.environ.items() if n not in (*VARIABLES, "LOCAL_RANK")}
        environment = alone | {
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_CACHE_DIR": knobs.cache.dir,
            "TMPDIR": self._temporary.name,
        }
        # Fresh, and not forked: this process may have threads, and a GPU. It imports what this one
        # would, but nothing from the working directory.
        path = [*filter(None, map(str, sys.path)), PACKAGE_PARENT]
        code = f"import sys; sys.path[:] = {path!r}; from {__name__} import main; main({DERIVE!r})"
        self._child = subprocess.Popen(
            [sys.executable or "python3", "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, whose end ends the child
        )
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            line = json.dumps(job | {"temporary": self._temporary.name}, default=str)
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()

    def __enter__(self) -> KernelStart:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            # Its processes are a group; none may be left.
            with contextlib.suppress(OSError), self._child:
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child = None
        if self._temporary is not None:
            self._temporary.cleanup()

    def join(self, progress: bool = False) -> None:
        """Wait until the missing kernels are compiled. What could not be is said once, and is
        compiled when it is launched.

        Args:
            progress: show a bar.
        """
        with self, tqdm(
            total=self.total, desc="compiling kernels", unit="kernel", leave=False,
            disable=None if progress and self._child else True,
        ) as bar:  # fmt: skip
            if self._child is not None and self._child.stdout is not None:
                self._hear(self._child.stdout.fileno(), bar)
        done = len(self.keys)
        if not self.failures and done != self.total:
            self.failures.append("a process ended early")
        if self.failures:
            some = "Some" if self.total is None else max(self.total - done, 0)
            logger.warning(
                "%s kernels were not compiled beforehand (%s): each is compiled when it is first "
                "launched.", some, self.failures[0],
            )  # fmt: skip

    def _hear(self, descriptor: int, bar: Any) -> None:
        poll, rest = select.poll(), b""
        poll.register(descriptor, select.POLLIN)
        while poll.poll(1e3 * STALL_S):
            if not (read := os.read(descriptor, 1 << 16)):
                return
            *lines, rest = (rest[-LONGEST_LINE:] + read).split(b"\n")
            for line in lines:  # any others are a library's
                kind, _, value = line.decode(errors="replace").partition(" ")
                if kind == "total" and value.isdecimal():
                    bar.total = self.total = int(value)
                elif kind == "key":
                    self.keys.append(value)
                elif kind == "error":
                    self.failures.append(value)
            bar.update(len(self.keys) + len(self.failures) - bar.n)
            bar.refresh()
        self.failures.append(f"nothing was compiled for {STALL_S:.0f} s")

    def keep(self) -> None:
        """Note, for the next start, that the program's kernels are there: also those that only a
        launch could compile. Where all have failed (a full disk), the next start tries again."""
        if self.was_kept or (self.total and not self.keys):
            return
        part = self._file.with_suffix(f".{uuid.uuid4().hex}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text("\n".join(self.keys))
            part.replace(self._file)
        except OSError as error:
            logger.warning("The list of kernels cannot be kept (%s).", error)


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """What the kernels of a program depend on, of a GPU of this machine."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": [properties.major, properties.minor],
        "processors": properties.multi_processor_count,
    }


def start_kernels(program: Mapping[str, Any], workers: int | None = None) -> KernelStart | None:
    """`KernelStart` on one of this host's ranks; None where another compiles, or kernels are
    interpreted."""
    if knobs.runtime.interpret or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    return KernelStart(program, workers)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def main(derive: str) -> None:
    """The child: reads a job, a line of JSON, from standard input; writes a line for each kernel.
    It ends with its standard input."""
    job = json.loads(sys.stdin.buffer.readline())
    # A timer, which forks do not inherit, and no thread: with threads a fork is not safe.
    signal.signal(signal.SIGALRM, partial(_end_with_input, job["temporary"]))
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    say = partial(_say, os.dup(1))
    os.dup2(2, 1)  # what a library prints is no line of ours
    os.nice(5)  # loading weights comes first
    try:
        kernels = import_module(derive).kernels_of(job["program"])
    except Exception as error:
        say("error", f"{type(error).__name__}: {error}")
        return
    say("total", len(kernels))
    kernels.sort(key=_expected, reverse=True)  # longest first, else some workers end late
    major, minor = job["program"]["capability"]
    target = GPUTarget("cuda", 10 * major + minor, 32)
    _make_linkable()
    # Each worker takes numbers from one pipe until it is empty.
    numbers, end = os.pipe()
    os.write(end, b"".join(number.to_bytes(2) for number in range(len(kernels))))
    os.close(end)
    workers = []
    for _ in range(min(job["workers"], len(kernels))):
        if (pid := os.fork()) == 0:
            _work(numbers, kernels, target, say)
        workers.append(pid)
    with NO_LAUNCHER:
        CudaUtils()  # Triton's module of C for what is not a launch
    for pid in workers:
        os.waitpid(pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)  # the interpreter's end forgets what a signal does


def _expected(kernel: Kernel) -> tuple[int, int]:
    """What orders kernels by the time that compiling them takes, roughly: their source text."""
    name = kernel[0].name
    place = -SLOWEST.index(name) if name in SLOWEST else -len(SLOWEST)
    return place, len(kernel[0].fn.src)


def _end_with_input(temporary: str, *_: object) -> None:
    if select.select([0], [], [], 0)[0]:  # nothing comes behind the job but the end
        shutil.rmtree(temporary, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _say(descriptor: int, kind: str, value: object) -> None:
    line = f"{kind} {' '.join(str(value).split())[:400]}\n"
    os.write(descriptor, line.encode(errors="replace"))  # at once: a pipe does not mix short ones


def _work(
    numbers: int, kernels: Sequence[Kernel], target: GPUTarget, say: Callable[[str, object], None]
) -> None:
    try:
        while taken := os.read(numbers, 2):
            source, options = kernels[int.from_bytes(taken)]
            try:
                compiled = triton.compile(source, target=target, options=options)
                # The module of C that launches kernels of this signature. Where libcuda is absent
                # it cannot be loaded, but is in the cache by then.
                with NO_LAUNCHER:
                    CudaLauncher(source, compiled.metadata)
                key = base64.b32encode(bytes.fromhex(compiled.hash))
                say("key", key.decode().rstrip("="))
            except Exception as error:
                say("error", f"{source.name}: {type(error).__name__}: {error}")
    finally:
        os._exit(0)


def _make_linkable() -> None:
    """Have launchers linked against an empty libcuda.so.1 where the machine has none."""
    with NO_LAUNCHER:
        libcuda_dirs()
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is not None:
        knobs.nvidia.libcuda_path = folder = tempfile.mkdtemp()
        command = ["-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o"]
        subprocess.run([compiler, *command, f"{folder}/libcuda.so.1"], check=False)
