"""What a process pushes to NVTX, as a profiler would be told (`nvtx_log.c`)."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch


class Range(NamedTuple):
    """A range of a thread, from its push to its pop."""

    thread: int
    path: tuple[str, ...]
    """Texts of the ranges around it, outermost first, and its own."""
    start: int
    """Nanoseconds."""
    end: int

    @property
    def text(self) -> str:
        """The range's own text."""
        return self.path[-1]


class NvtxLog(NamedTuple):
    """One process's log."""

    ranges: list[Range]
    """By their starts."""
    marks: list[Range]
    """Moments."""
    awaited: list[Range]
    """Ranges of the process; their ends are checked to be there."""

    def since(self, text: str) -> NvtxLog:
        """What came after the mark `text`."""
        (begin,) = (mark.start for mark in self.marks if mark.text == text)
        return NvtxLog(*([each for each in part if each.start > begin] for part in self))

    def until(self, text: str) -> NvtxLog:
        """What came before the mark `text`."""
        (end,) = (mark.start for mark in self.marks if mark.text == text)
        return NvtxLog(*([each for each in part if each.start < end] for part in self))


def injection(folder: Path) -> dict[str, str]:
    """The environment in which processes write their logs to a folder. The test is skipped where
    there is no C compiler, or no NVTX in torch."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to make NVTX's injection library with")
    if not hasattr(torch._C, "_nvtx"):
        pytest.skip("this torch is no CUDA build: it has no NVTX")
    source, library = Path(__file__).with_name("nvtx_log.c"), folder / "nvtx_log.so"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return {"NVTX_INJECTION64_PATH": str(library), "NVTX_LOG": str(folder / "log")}


def read_log(folder: Path, process: int) -> NvtxLog:
    """The log of a process that has ended; its pushes and pops must match."""
    log = NvtxLog([], [], [])
    stacks: dict[int, list[tuple[str, int]]] = defaultdict(list)
    started: dict[int, tuple[str, int]] = {}
    for line in (folder / f"log.{process}").read_text().splitlines():
        time, thread, what, number, text = line.split(" ", 4)
        stack, moment = stacks[int(thread)], int(time)
        path = tuple(name for name, _ in stack)
        if what == "push":
            stack.append((text, moment))
        elif what == "pop":
            _, start = stack.pop()
            log.ranges.append(Range(int(thread), path, start, moment))
        elif what == "mark":
            log.marks.append(Range(int(thread), (*path, text), moment, moment))
        elif what == "start":
            started[int(number)] = text, moment
        else:
            text, start = started.pop(int(number))
            log.awaited.append(Range(int(thread), (text,), start, moment))
    assert not started
    assert not any(stacks.values()), stacks
    log.ranges.sort(key=lambda each: each.start)
    return log
