"""Folders that no other user reaches: the living keep theirs, those of the killed are removed."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.communication.own_folder import OwnFolder, is_private, remove_left_folders

OWNER = """
import sys
from megatron_async.communication.own_folder import OwnFolder
print(OwnFolder().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_after_its_owner_was_killed_and_not_before(parent: Path) -> None:
    environment = {"TMPDIR": str(parent), "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], env=environment, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        (folder / "ranks-0").mkdir()
        (folder / "ranks-0" / "store").touch()
        with OwnFolder() as mine:
            # Nothing is asked about process numbers, which mean nothing in another container.
            assert folder.is_dir()
            assert mine.path != folder
        owner.kill()
        owner.wait()
    with OwnFolder() as mine:
        assert list(parent.iterdir()) == [mine.path]
        assert stat.S_IMODE(mine.path.stat().st_mode) == 0o700
        assert is_private(mine.path)
    assert list(parent.iterdir()) == []


def test_what_is_no_left_folder_stays(parent: Path) -> None:
    new = parent / "megatron-async-run-new"  # its owner has not made the lock yet
    other = parent / "megatron-async-setup-0.log"
    for folder in (new, other):
        folder.mkdir()
    link = parent / "megatron-async-run-link"
    target = parent / "target"
    target.mkdir()
    (target / "lock").touch()
    link.symlink_to(target)
    remove_left_folders(parent)
    assert new.is_dir()
    assert other.is_dir()
    assert (target / "lock").exists()
    assert not is_private(link)
    new.chmod(0o755)
    assert not is_private(new)
