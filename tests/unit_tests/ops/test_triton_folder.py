"""Triton has a folder for its kernels, whatever has become of its own."""

import os
import tempfile
from pathlib import Path

import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.ops import triton_folder
from megatron_async.ops.triton_folder import VARIABLE, choose_triton_folder
from megatron_async.version import __version__

knobs = pytest.importorskip("triton").knobs


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Triton's folder lies below a file."""
    (tmp_path / "file").touch()
    own = str(tmp_path / "file" / "cache")
    monkeypatch.setenv(VARIABLE, own)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    choose_triton_folder.cache_clear()
    with knobs.cache.scope():
        yield own
    choose_triton_folder.cache_clear()


def test_another_folder_and_a_word(own, caplog, tmp_path):
    assert knobs.cache.dir == own
    choose_triton_folder()
    choose_triton_folder()
    assert os.path.dirname(knobs.cache.dir) == str(tmp_path)
    (told,) = caplog.messages
    assert own in told
    assert VARIABLE in told


def test_kernels_of_a_folder_that_takes_nothing_are_used(own, monkeypatch, tmp_path, caplog):
    """An image's folder may be another user's, and hold all kernels."""
    given, write = tmp_path / "given", triton_folder._write_to

    def refuse(folder):
        if folder == "given":
            raise PermissionError(13, "Permission denied")
        write(folder)

    (given / "KEY").mkdir(parents=True)
    (given / "KEY" / "kernel.cubin").write_bytes(b"made")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "given")
    monkeypatch.setattr(triton_folder, "_write_to", refuse)
    assert not choose_triton_folder()
    folder = Path(knobs.cache.dir)
    assert (folder / "KEY" / "kernel.cubin").read_bytes() == b"made"
    (folder / "KEY" / "other.cubin").touch()
    assert not (given / "KEY" / "other.cubin").exists()


def test_a_full_disk(own, monkeypatch, tmp_path):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigurationError, match=f"No space left.*set {VARIABLE}"):
        choose_triton_folder()


def test_a_folder_that_takes_files_stays(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new" / "cache"))
    choose_triton_folder.cache_clear()
    with knobs.cache.scope():
        assert choose_triton_folder()
        assert knobs.cache.dir == str(tmp_path / "new" / "cache")
    choose_triton_folder.cache_clear()
    assert not caplog.messages


@pytest.mark.parametrize("named", [None, VARIABLE, "TRITON_HOME"])
def test_kernels_are_kept_by_version_unless_triton_was_told(named, monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "ours"))
    for variable in (VARIABLE, "TRITON_HOME"):
        monkeypatch.delenv(variable, raising=False)
    if named is not None:
        monkeypatch.setenv(named, str(tmp_path / "theirs"))
    choose_triton_folder.cache_clear()
    with knobs.cache.scope():
        theirs = knobs.cache.dir
        choose_triton_folder()
        ours = str(tmp_path / "ours" / __version__ / "kernels")
        assert knobs.cache.dir == (ours if named is None else theirs)
    choose_triton_folder.cache_clear()
