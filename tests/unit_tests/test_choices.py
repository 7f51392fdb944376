"""Choices as rows: two starts choose the same, of ranks the leader's row counts, and no file of the
cache makes a start fail."""

import itertools
import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_async import InferenceConfig, choices
from megatron_async.cache_folders import SERVICE_VARIABLE, VARIABLE
from megatron_async.choices import Choices, Question, Row, known_rows, read_rows, write_rows
from megatron_async.errors import ConfigurationError
from megatron_async.version import __version__
from tests.support.ranks import run_ranks

GPU: Any = SimpleNamespace(name="A GPU 80GB")
SHAPE = {"heads": 4, "dtype": "bfloat16", "backends": ["triton"]}


class Value(msgspec.Struct, forbid_unknown_fields=True):
    """Names what was chosen."""

    names: list[str]


def check(value: Value) -> None:
    if not {*value.names} <= {"one", "two", "three"}:
        raise ValueError(f"unknown names {value.names}")


def question(kind: str = "colours", **changed: Any) -> Question[Value]:
    return Question(kind, SHAPE | changed, Value(["one"]), check)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache's folder; nothing is shipped."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(SERVICE_VARIABLE, raising=False)
    monkeypatch.setattr(choices, "SHIPPED", tmp_path / "shipped.json")
    return tmp_path / "cache"


def start(mode: str, measured: str, asked: Question[Value] | None = None) -> tuple[str, str]:
    """The choice of a start whose own times would choose `measured`, and its source."""
    mine, asked = Choices(mode, GPU), asked or question()
    found = mine.find(asked)
    if found is None:
        found = mine.keep(asked, Value([measured]))
    (record,) = mine.records()
    assert record["value"] == {"names": found.names}
    return found.names[0], record["source"]


def kept_file(folder: Path) -> Path:
    (file,) = folder.rglob("*.json")
    return file


def ship(value: Any, **changed: Any) -> None:
    row = Row("colours", GPU.name, SHAPE, choices.versions(), value)
    write_rows(choices.SHIPPED, [msgspec.structs.replace(row, **changed)])


def test_two_starts_choose_the_same() -> None:
    assert start("cached", "two") == ("two", "measured")
    assert start("cached", "three") == ("two", "cached")


def test_measure_replaces() -> None:
    start("cached", "two")
    assert start("measure", "three") == ("three", "measured")
    assert start("cached", "two") == ("three", "cached")


def test_a_process_that_was_first_is_followed() -> None:
    """Both have found nothing, and measure at the same time."""
    first, second = Choices("cached", GPU), Choices("cached", GPU)
    assert first.find(question()) is second.find(question()) is None
    assert first.keep(question(), Value(["two"])).names == ["two"]
    assert second.keep(question(), Value(["three"])).names == ["two"]


def test_the_order_of_sources(folder: Path) -> None:
    start("cached", "two")
    ship({"names": ["three"]})
    assert start("cached", "one") == ("three", "shipped")
    assert start("shipped", "one") == ("three", "shipped")
    assert start("measure", "one") == ("one", "measured")


def test_shipped_measures_nothing_and_reads_no_cache(folder: Path) -> None:
    start("cached", "two")
    assert start("shipped", "three") == ("one", "by rule")


@pytest.mark.parametrize(
    "changed",
    [
        {"gpu": "A GPU 40GB"},
        {"kind": "colour"},
        {"shape": SHAPE | {"heads": 5}},
        {"shape": SHAPE | {"more": 1}},
        {"versions": {"torch": "2.11"}},
    ],
)
def test_a_row_that_is_near_is_none(changed: dict[str, Any]) -> None:
    ship({"names": ["three"]}, **changed)
    assert start("shipped", "two") == ("one", "by rule")
    assert start("cached", "two") == ("two", "measured")


def test_another_version_measures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    start("cached", "two")
    monkeypatch.setattr(choices, "FORMAT", "next")
    assert start("cached", "three") == ("three", "measured")
    monkeypatch.undo()


def test_an_unsound_measurement_is_not_kept(folder: Path) -> None:
    mine = Choices("cached", GPU)
    assert mine.keep(question(), Value(["two"]), is_sound=False).names == ["two"]
    assert not [*folder.rglob("*.json")]


NESTED = b'{"rows": [{"value": {"names": ' + b"[" * 100_000
HUGE = b'{"rows": []}' + b" " * choices.MOST_BYTES


def hostile(file: Path, what: Any) -> None:
    text = file.read_bytes()
    if isinstance(what, bytes):
        file.write_bytes(what)
    elif isinstance(what, dict):
        table = json.loads(text)
        table["rows"][0] |= what
        file.write_text(json.dumps(table))
    else:
        file.unlink()
        what(file)


def linked(file: Path) -> None:
    file.symlink_to("/dev/zero")


def linked_nowhere(file: Path) -> None:
    file.symlink_to(file.with_name("nowhere"))


def a_tebibyte(file: Path) -> None:
    """A hole: no place on the disk, and more than there is in memory."""
    file.touch()
    os.truncate(file, 1 << 40)


@pytest.mark.parametrize(
    "what",
    [
        b"",
        b"\x80\x04K\x01.",
        b"[]",
        b'{"rows": {}}',
        b'{"rows": [], "more": 1}',
        b'{"rows": [1e999]}',
        NESTED,
        HUGE,
        {"value": {"names": ["rm -rf"]}},
        {"value": {"names": "one"}},
        {"value": {"names": [1]}},
        {"value": {"names": ["one"], "more": 1}},
        {"value": None},
        {"shape": []},
        {"code": "import os"},
        a_tebibyte,
        linked,
        linked_nowhere,
        os.mkfifo,
    ],
    ids=lambda what: getattr(what, "__name__", repr(what)[:30]),
)
def test_what_a_file_holds_is_data(folder: Path, what: Any, caplog: Any) -> None:
    """A start tells the file and measures; the next one finds a sound row again."""
    start("cached", "two")
    file = kept_file(folder)
    hostile(file, what)
    assert start("cached", "three") == ("three", "measured")
    assert str(file) in caplog.text
    assert "measured anew" in caplog.text
    assert start("cached", "one") == ("three", "cached")
    assert not file.is_symlink()


def test_a_shipped_table_that_is_damaged(caplog: Any) -> None:
    choices.SHIPPED.write_text("{")
    assert start("shipped", "two") == ("one", "by rule")
    assert "install the package again" in caplog.text


@pytest.mark.parametrize("way", ["file", "folder", "home", "another's home"])
def test_a_folder_that_takes_nothing(folder, way: str, caplog, monkeypatch):
    if way == "file":
        folder.write_text("")
    elif way == "folder":
        start("cached", "two")
        file = kept_file(folder)
        file.unlink()
        file.mkdir()
    elif way == "another's home":
        monkeypatch.setenv(VARIABLE, "~nobody-has-this-name/cache")
    else:
        monkeypatch.delenv(VARIABLE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    caplog.clear()
    opened = len(os.listdir("/proc/self/fd"))
    assert start("cached", "two") == ("two", "measured")
    assert len(os.listdir("/proc/self/fd")) == opened
    assert "cannot be kept" in caplog.text
    assert VARIABLE in caplog.text
    if way == "folder":
        assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_file_system_without_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    second = Choices("cached", GPU)
    assert second.find(question()) is None
    start("cached", "two")
    assert start("cached", "three") == ("two", "cached")
    assert second.keep(question(), Value(["three"])).names == ["two"]


@pytest.mark.parametrize("mode", ["cached", "measure"])
@pytest.mark.parametrize("cache", ["cache", "/dev/null"])
def test_replicas_of_a_service_choose_the_same(folder, mode: str, cache: str, monkeypatch):
    """Whether they measure at the same time, or one starts again when the cache is lost or another
    row is kept there: in the cache is what they use."""
    monkeypatch.setenv(VARIABLE, str(folder.parent / cache))
    monkeypatch.setenv(SERVICE_VARIABLE, str(folder.parent / "service"))
    first, second = Choices(mode, GPU), Choices(mode, GPU)
    assert first.find(question()) is second.find(question()) is None
    assert first.keep(question(), Value(["two"])).names == ["two"]
    assert second.keep(question(), Value(["three"])).names == ["two"]
    kept = [read_rows(file)[0].value["names"] for file in folder.rglob("*.json")]
    assert kept == ([["two"]] if cache == "cache" else [])
    shutil.rmtree(folder, ignore_errors=True)
    assert start(mode, "three") == ("two", "cached")
    monkeypatch.delenv(SERVICE_VARIABLE)
    assert start("measure", "one") == ("one", "measured")
    monkeypatch.setenv(SERVICE_VARIABLE, str(folder.parent / "service"))
    assert start(mode, "three") == ("two", "cached")
    assert start("shipped", "three") == ("one", "by rule")


def test_a_service_that_has_ended(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(SERVICE_VARIABLE, str(folder.parent / "ended" / "choices"))
    assert start("cached", "two") == ("two", "measured")
    assert start("cached", "three") == ("two", "cached")
    assert not (folder.parent / "ended").exists()


def test_a_service_whose_first_row_was_cached(folder: Path, monkeypatch: Any) -> None:
    start("cached", "two")
    monkeypatch.setenv(SERVICE_VARIABLE, str(folder.parent / "service"))
    assert start("cached", "one") == ("two", "cached")
    shutil.rmtree(folder)
    assert start("cached", "three") == ("two", "cached")


def test_the_log_names_choice_and_source(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "megatron_async")
    start("cached", "two")
    assert 'choice of colours: {"names": ["two"]} (measured)' in caplog.text


def test_rows_of_a_gpu(folder: Path) -> None:
    ship({"names": ["three"]}, gpu="NVIDIA H100-80GB")
    start("cached", "two")
    (folder / "0").mkdir()
    (kept_file(folder).parent / "bad.json").write_text("{")
    for gpu, source in ("h100", "shipped"), ("A GPU 80GB", "cached"):
        ((_, found),) = known_rows(gpu)
        assert found == source
    assert not [*known_rows("h10")]


def test_the_shipped_table_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = read_rows(choices.SHIPPED)
    for one, other in itertools.combinations(rows, 2):
        assert one.key != other.key
    assert {row.kind for row in rows} <= {"prefill attention", "mixed steps"}


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"choices='never' is unknown: use one of measure"):
        InferenceConfig(choices="never")


def _on_rank(folder: str) -> list[Any]:
    """Two starts of a rank whose times and cache are its own."""
    rank = os.environ["RANK"]
    os.environ[VARIABLE] = f"{folder}/{rank}"
    choices.SHIPPED = Path(folder) / "none"
    mine, own = ["two", "three"][int(rank)], question("of the rank's own cache")
    row = Row(own.kind, GPU.name, own.shape, choices.versions(), {"names": [mine]})
    file = Path(os.environ[VARIABLE]) / __version__ / choices.FOLDER / row.file_name
    file.parent.mkdir(parents=True)
    write_rows(file, [row])
    found = [start("cached", mine), start("cached", mine, own)]
    return [found, choices.everywhere("names", [mine, "one"]), len([*file.parent.iterdir()])]


def test_ranks_use_the_leaders_rows(tmp_path: Path) -> None:
    """The leader's measurement, or the row of its cache, which it alone keeps."""
    chosen = [("two", "measured"), ("two", "cached")]
    assert run_ranks(2, _on_rank, str(tmp_path)) == [[chosen, ["one"], 2], [chosen, ["one"], 1]]
