"""Triton's kernels are compiled by processes of their own, on all cores, while weights load.

`KernelStart` is the side of the process that starts an engine. The other side is this module as a
program: it imports the kernels once, then forks workers, which take one kernel after another and
leave what they made in Triton's cache. No such process sees a GPU, or needs one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import triton
from tqdm import tqdm
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils, libcuda_dirs
from triton.runtime.jit import JITFunction

from megatron_async.communication.rendezvous import VARIABLES
from megatron_async.ops.kernel_list import (
    MOST_BYTES,
    BadKernel,
    Kernel,
    KernelList,
    describe,
    find_kernels,
    full_name,
    source_of,
)
from megatron_async.ops.triton_folder import choose_triton_folder

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
"""Seconds without a compiled kernel after which nobody waits any longer. The slowest take 10."""


class Compilation(NamedTuple):
    """A kernel that Triton made or found in its cache."""

    name: str
    was_kept: bool
    seconds: float


class Compilations:
    """Listens to Triton: what this process compiles, or takes from the cache, from now on.

    Attributes:
        all: of kernels of any package.
        hashes: Triton's hash of each kernel of ours.
    """

    def __init__(self) -> None:
        self.all: list[Compilation] = []
        self.hashes: list[tuple[Kernel, str]] = []
        self._next = knobs.compilation.listener
        knobs.compilation.listener = self

    def __call__(self, *, src: Any, metadata: dict[str, Any], **told: Any) -> None:
        self.all.append(Compilation(src.name, told["cache_hit"], told["times"].total / 1e6))
        function = getattr(src, "fn", None)
        if isinstance(function, JITFunction) and full_name(function).startswith("megatron_async."):
            with contextlib.suppress(BadKernel, TypeError, ValueError):
                kernel = describe(function, src.signature, src.constants, src.attrs, metadata)
                json.dumps(kernel)
                self.hashes.append((kernel, metadata["hash"]))
        if self._next is not None:
            self._next(src=src, metadata=metadata, **told)


@cache
def compilations() -> Compilations:
    """The one of this process; it listens from the first call on."""
    return Compilations()


class KernelStart:
    """The kernels of an engine that starts: those that are missing are compiled beside.

    Args:
        program: what the kernels depend on (`lab/absent_gpu.py` reads it), as JSON has it.
        compiles: whether this process is the one of its host that compiles.
        workers: processes; None: one for each core but one.

    Attributes:
        failures: kernels that could not be compiled, and why; or why nothing could be.
        total: kernels that were missing; None: not known yet.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        compiles: bool = True,
        workers: int | None = None,
    ) -> None:
        self.list = KernelList(knobs.cache.dir, program)
        self.failures: list[str] = []
        self.total: int | None = 0
        self._seen = len(compilations().hashes)
        self._told: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._kernels: list[Kernel] = []
        self._child: subprocess.Popen[bytes] | None = None
        is_known = self.list.read()
        missing = self.list.missing()
        if compiles and (missing or not is_known):
            job = {"capability": program["capability"], "workers": workers or max(1, cores() - 1)}
            job |= {"kernels": missing} if is_known else {"program": program}
            self.total = None
            self._start(job)

    def _start(self, job: dict[str, Any]) -> None:
        # Fresh, and not forked: this process may have threads, and a GPU.
        paths = [PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
        alone = {n: v for n, v in os.environ.items() if n not in (*VARIABLES, "LOCAL_RANK")}
        environment = alone | {
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_CACHE_DIR": knobs.cache.dir,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", __spec__.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, whose end ends the child
            )
        except OSError as error:
            self.failures.append(str(error))
            self._told.put(None)
            return
        line = json.dumps(job, default=str).encode() + b"\n"
        talk = threading.Thread(
            target=_talk,
            args=(line, self._child.stdin, self._child.stdout, self._told),
            daemon=True,
        )
        talk.start()

    def join(self, progress: bool = False) -> int:
        """Wait until the missing kernels are compiled. What could not be is said once, and is
        compiled when it is launched.

        Args:
            progress: show a bar.

        Returns:
            kernels that were compiled.
        """
        done = 0
        try:
            with tqdm(
                total=self.total, desc="compiling kernels", unit="kernel", leave=False,
                disable=None if progress and self._child else True,
            ) as bar:  # fmt: skip
                while self._child is not None and (told := self._told.get(timeout=STALL_S)):
                    if "kernels" in told:
                        self._kernels = told["kernels"]
                        bar.total = self.total = len(self._kernels)
                        bar.refresh()
                        continue
                    if "error" in told:
                        self.failures.append(told["error"])
                    if "number" in told:
                        kernel = self._kernels[told["number"]]
                        self.list.put(kernel, told.get("hash"))
                        done += "hash" in told
                        bar.update()
        except queue.Empty:
            self.failures.append(f"nothing was compiled for {STALL_S:.0f} s")
        finally:
            self._end()
        missing = None if self.total is None else self.total - done
        if self.failures or missing != 0:
            why = self.failures[0] if self.failures else "a process ended early"
            logger.warning(
                "%s kernels were not compiled beforehand (%s): each is compiled when it is first "
                "launched.", "Some" if missing is None else missing, why,
            )  # fmt: skip
        return done

    def _end(self) -> None:
        if self._child is None:
            return
        with contextlib.suppress(OSError):  # its processes are a group; none may be left
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._child = None

    def keep(self) -> None:
        """Write the list of what was compiled by now, for the next start."""
        for kernel, hash_ in compilations().hashes[self._seen :]:
            self.list.put(kernel, hash_)
        self._seen = len(compilations().hashes)
        try:
            self.list.write()
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


def start_kernels(program: Mapping[str, Any]) -> KernelStart | None:
    """Begin to compile what is missing, on one of this host's ranks; None where kernels are
    interpreted."""
    if knobs.runtime.interpret:
        return None
    choose_triton_folder()
    return KernelStart(program, compiles=os.environ.get("LOCAL_RANK", "0") == "0")


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def _talk(
    job: bytes, stdin: IO[bytes], stdout: IO[bytes], told: queue.SimpleQueue[dict[str, Any] | None]
) -> None:
    # A thread of its own: a full pipe would hold one of the two sides back while weights load.
    with contextlib.suppress(ValueError, OSError):
        stdin.write(job)
        stdin.flush()
        while line := stdout.readline(MOST_BYTES):
            told.put(json.loads(line))
    told.put(None)


def main() -> None:
    """The program: reads a job, a line of JSON, from standard input; writes a line for each kernel.
    It ends with its standard input."""
    job = json.loads(sys.stdin.buffer.readline())
    # A timer, which forks do not inherit, and no thread: with threads a fork is not safe.
    signal.signal(signal.SIGALRM, _end_with_input)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    say = partial(_say, os.dup(1))
    os.dup2(2, 1)  # what a library prints is no line of ours
    os.nice(5)  # loading weights comes first
    try:
        kernels = job.get("kernels")
        if kernels is None:
            kernels = import_module(DERIVE).kernels_of(job["program"])
        functions = find_kernels()
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"[:400]})
        return
    say({"kernels": kernels})
    major, minor = job["capability"]
    target = GPUTarget("cuda", 10 * major + minor, 32)
    with tempfile.TemporaryDirectory() as folder:
        _make_linkable(folder)
        # Each worker takes numbers from one pipe until it is empty.
        numbers, end = os.pipe()
        os.write(end, b"".join(number.to_bytes(2) for number in range(len(kernels))))
        os.close(end)
        workers = []
        for _ in range(min(job["workers"], len(kernels))):
            if (pid := os.fork()) == 0:
                _work(numbers, kernels, functions, target, say)
            workers.append(pid)
        with NO_LAUNCHER:
            CudaUtils()  # Triton's module of C for what is not a launch
        for pid in workers:
            os.waitpid(pid, 0)


def _end_with_input(*_: object) -> None:
    if select.select([0], [], [], 0)[0]:  # nothing comes behind the job but the end
        os.killpg(0, signal.SIGKILL)


def _say(descriptor: int, told: dict[str, Any]) -> None:
    line = memoryview(json.dumps(told).encode() + b"\n")
    while line:  # a short one, as workers have, is written at once: a pipe does not mix them
        line = line[os.write(descriptor, line) :]


def _work(
    numbers: int,
    kernels: list[Kernel],
    functions: Mapping[str, JITFunction[Any]],
    target: GPUTarget,
    say: Callable[[dict[str, Any]], None],
) -> None:
    try:
        while taken := os.read(numbers, 2):
            number = int.from_bytes(taken)
            try:
                say({"number": number, "hash": _compile(kernels[number], functions, target)})
            except Exception as error:
                why = f"{kernels[number]['kernel']}: {type(error).__name__}: {error}"
                say({"number": number, "error": why[:400]})
    finally:
        os._exit(0)


def _compile(kernel: Kernel, functions: Mapping[str, JITFunction[Any]], target: GPUTarget) -> str:
    source, options = source_of(kernel, functions)
    compiled = triton.compile(source, target=target, options=options)
    # The module of C that launches kernels of this signature. Where libcuda is absent it cannot be
    # loaded, but is in the cache by then.
    with NO_LAUNCHER:
        CudaLauncher(source, compiled.metadata)
    return str(compiled.hash)


def _make_linkable(folder: str) -> None:
    """Have launchers linked against an empty libcuda.so.1 where the machine has none."""
    with NO_LAUNCHER:
        libcuda_dirs()
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is not None:
        subprocess.run(
            [compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o",
             os.path.join(folder, "libcuda.so.1")],
            check=False, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        knobs.nvidia.libcuda_path = folder


if __name__ == "__main__":
    main()
