"""Machine code of other sources is removed, and that of these sources is kept."""

import pytest

from megatron_async.ops.cpu.compiler import forget_stale_loops


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
