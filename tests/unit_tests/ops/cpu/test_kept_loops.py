"""A disk that does not take compiled loops costs time alone."""

import errno
import pickle

import pytest

from megatron_async.ops.cpu import compile_loops, kept_loops


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
