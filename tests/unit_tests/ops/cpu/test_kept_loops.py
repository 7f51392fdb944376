"""Compiled loops on a disk: those of other sources are removed, and a disk that takes none costs
time alone."""

import errno
import os
import pickle
import signal
import subprocess
import threading

import pytest

from megatron_async.ops.cpu import compile_loops, kept_loops
from megatron_async.ops.cpu.compiler import forget_stale_loops


def double(number):
    return number + number


@pytest.fixture(autouse=True)
def _untold(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_loops, "_told", [])
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("access", "error"),
    [
        ("save", OSError(errno.ENOSPC, "No space left on device")),
        ("load", PermissionError(errno.EACCES, "Permission denied")),
        ("load", pickle.UnpicklingError("pickle data was truncated")),
    ],
)
def test_what_the_disk_refuses_is_compiled_and_told_once(
    access, error, monkeypatch, caplog, tmp_path
):
    def fail(*_):
        raise error

    monkeypatch.setattr(f"numba.core.caching.IndexDataCacheFile.{access}", fail)
    loop = kept_loops.njit(cache=True)(double)
    assert [loop(2), loop(2.5)] == [4, 5.0]
    assert kept_loops.is_kept(loop) == (access != "save")
    (told,) = caplog.messages
    assert str(tmp_path) in told
    assert str(error) in told
    assert "NUMBA_CACHE_DIR" in told


def test_a_loop_for_which_there_is_no_folder(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("cannot cache function 'double': no locator available")

    monkeypatch.setattr("numba.core.caching.FunctionCache.__init__", fail)
    assert kept_loops.njit(cache=True)(double)(2) == 4
    assert "NUMBA_CACHE_DIR" in caplog.messages[0]


def test_a_loop_is_kept_where_the_disk_takes_it(tmp_path, caplog):
    for hits in (0, 1):
        loop = kept_loops.njit(cache=True)(double)
        assert loop(3) == 6
        assert sum(loop.stats.cache_hits.values()) == hits
        assert kept_loops.is_kept(loop)
    assert list(tmp_path.rglob("*.nbc"))
    assert not caplog.messages


def test_a_replica_compiles_only_what_does_not_lie_on_the_disk(monkeypatch):
    compiled = []
    monkeypatch.setattr(compile_loops, "compiles", lambda: True)
    monkeypatch.setattr(compile_loops, "compile_all", lambda progress: compiled.append(progress))
    for is_kept, times in ((True, 0), (False, 1)):
        monkeypatch.setattr(kept_loops, "is_kept", lambda loop, answer=is_kept: answer)
        compile_loops.compile_missing()
        assert len(compiled) == times


def test_a_change_of_any_source_forgets_all(tmp_path):
    kept, source = tmp_path / "__pycache__", tmp_path / "tile.py"
    kept.mkdir()
    source.write_text("STEP = 16")
    code, other = kept / "jobs.product-1.py312.1.nbc", kept / "tile.cpython-312.pyc"

    def is_kept():
        code.touch(), other.touch()
        forget_stale_loops(tmp_path)
        assert other.exists()
        return code.exists()

    assert [is_kept(), is_kept()] == [False, True]
    source.write_text("STEP = 32")
    assert [is_kept(), is_kept()] == [False, True]
    (tmp_path / "more.py").write_text("WIDER = True")
    assert [is_kept(), is_kept()] == [False, True]


@pytest.mark.parametrize("folder", ["cpu/more", "sampling/cpu"])
def test_folders_in_the_folder_and_others_are_looked_at_too(folder, tmp_path):
    inside = tmp_path / folder
    (inside / "__pycache__").mkdir(parents=True)
    (tmp_path / "cpu").mkdir(exist_ok=True)
    code = inside / "__pycache__" / "draw-1.py312.1.nbc"
    for text, is_kept in (("A = 1", False), ("A = 1", True), ("A = 2", False)):
        (inside / "noise.py").write_text(text)
        code.touch()
        forget_stale_loops(tmp_path / "cpu", tmp_path / "sampling" / "cpu")
        assert code.exists() == is_kept


def test_sources_without_a_cache_folder(tmp_path):
    forget_stale_loops(tmp_path)
    assert (tmp_path / "__pycache__" / "loops.sha256").exists()


def test_a_folder_that_nobody_may_write_to(tmp_path):
    forget_stale_loops(tmp_path / "nowhere" / "at all")


def test_another_process_compiles_from_the_end_and_ends_with_this_one(monkeypatch):
    """Break it: forget to kill the other process."""
    began, made, others = threading.Event(), [], []
    parts = {lambda: made.append("first"): 1.0, lambda: began.wait(60): 1.0}
    run = subprocess.Popen

    def popen(command, **options):
        code = command[-1].replace("loops.compile_from_the_end(True)", "print(); input()")
        others.append(run([*command[:-1], code], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        threading.Thread(target=lambda: others[0].stdout.readline() and began.set()).start()
        return others[0]

    monkeypatch.setattr(compile_loops, "compiles", lambda: True)
    monkeypatch.setattr(compile_loops, "_parts", lambda has_float64: parts)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", popen)
    compile_loops.compile_all(has_float64=True)
    assert began.is_set()
    assert made == ["first"]
    assert others[0].returncode == -signal.SIGKILL
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    compile_loops.compile_all(has_float64=True)
    assert len(others) == 1


def test_the_other_process_begins_with_the_last_part(monkeypatch):
    made = []
    parts = {lambda: made.append("first"): 1.0, lambda: made.append("last"): 1.0}
    monkeypatch.setattr(compile_loops, "_parts", lambda has_float64: parts)
    compile_loops.compile_from_the_end(has_float64=True)
    assert made == ["last", "first"]
