"""`tune`: what it says, what it writes, and that there is nothing to tune on a CPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_async import choices, devices, llm
from megatron_async.cache_folders import VARIABLE
from megatron_async.choices import Choices, Question, Row, read_rows, write_rows
from megatron_async.cli import main as cli


class Value(msgspec.Struct):
    """A number that was measured."""

    number: int


GPU: Any = SimpleNamespace(name="NVIDIA H200")
SHAPE: dict[str, Any] = {"heads": 4}


class MeasuringLLM:
    """Measures as an engine's start does, on a card that is not here."""

    number, asks = 5, True
    is_primary_rank = True

    def __init__(self, model: str, progress: bool, **options: Any) -> None:
        made = Choices(options["choices"], GPU, progress)
        self.engine = SimpleNamespace(context=SimpleNamespace(choices=made))
        if not self.asks:
            return
        question = Question("colours", SHAPE, Value(0), lambda value: None)
        assert made.find(question) is None, "it always measures"
        made.keep(question, Value(self.number))

    def __enter__(self) -> "MeasuringLLM":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(devices, "resolve_device_name", lambda name: "cuda:0")
    monkeypatch.setattr(llm, "LLM", MeasuringLLM)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(choices, "SHIPPED", tmp_path / "shipped.json")
    return tmp_path


def test_what_was_measured_is_kept_and_told(card: Path, capsys: Any) -> None:
    assert cli.main(["tune", "dummy:tiny"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == 'colours, NVIDIA H200: {"number": 5}'
    file = Path(second.removeprefix("  kept in "))
    (row,) = read_rows(file)
    assert (row.gpu, row.value) == ("NVIDIA H200", {"number": 5})
    write_rows(choices.SHIPPED, [row])
    assert cli.main(["tune", "dummy:tiny"]) == 0
    assert "takes the row for it that comes with this package" in capsys.readouterr().out


def test_into_a_table(card: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the same key is replaced, all others stay."""
    table = card / "table.json"
    other = Row("colours", "NVIDIA H100", SHAPE, choices.versions(), {"number": 1})
    write_rows(table, [other])
    for number in 5, 6:
        monkeypatch.setattr(MeasuringLLM, "number", number)
        assert cli.main(["tune", "dummy:tiny", "--into", str(table), "--json"]) == 0
        (record,) = json.loads(capsys.readouterr().out)["choices"]
        assert (record["value"], record["source"]) == ({"number": number}, "measured")
    found = read_rows(table)
    assert [(row.gpu, row.value["number"]) for row in found] == [("NVIDIA H100", 1), (GPU.name, 6)]
    link = card / "link.json"
    link.symlink_to(table.name)
    assert cli.main(["tune", "dummy:tiny", "--into", str(link)]) == 0
    assert link.is_symlink()
    assert read_rows(table) == found
    capsys.readouterr()
    table.write_text("{}")
    monkeypatch.setattr(llm, "LLM", None)  # told before anything is built
    assert cli.main(["tune", "dummy:tiny", "--into", str(table)]) == 2
    assert "name a table of rows, or a new file" in capsys.readouterr().err
    assert table.read_text() == "{}"


def test_what_is_not_kept_is_told(card: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the cache has a row of an earlier run."""
    assert cli.main(["tune", "dummy:tiny"]) == 0
    keep = Choices.keep
    monkeypatch.setattr(Choices, "keep", lambda *asked: keep(*asked, is_sound=False))
    assert cli.main(["tune", "dummy:tiny"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  not kept"


def test_nothing_to_choose(card: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasuringLLM, "asks", False)
    assert cli.main(["tune", "dummy:tiny"]) == 0
    assert "nothing was to be chosen" in capsys.readouterr().out


def test_a_cpu_has_nothing_to_tune(capsys: Any) -> None:
    assert cli.main(["tune", "dummy:tiny", "--device", "cpu"]) == 2
    assert "there is nothing to tune on a CPU: only kernels" in capsys.readouterr().err


def test_tune_measures(capsys: Any) -> None:
    assert cli.main(["tune", "dummy:tiny", "--choices", "shipped"]) == 2
    assert "--choices shipped: tune measures; leave it out" in capsys.readouterr().err


def test_info_shows_the_rows_of_a_model(card: Path, capsys: Any) -> None:
    """Rows of the GPU and of the model's heads, from the table and from the cache."""
    heads = {
        "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128, "dtype": "bfloat16",
        "block_size": 256,
    }  # fmt: skip
    row = Row("prefill attention", "NVIDIA H200", heads, choices.versions(), {"backends": ["a"]})
    others = [
        msgspec.structs.replace(row, versions={"torch": "2.1"}),
        msgspec.structs.replace(row, gpu="NVIDIA H100 80GB HBM3"),
        msgspec.structs.replace(row, shape=heads | {"num_attention_heads": 16}),
        msgspec.structs.replace(row, shape=heads | {"dtype": "float16"}),
    ]
    write_rows(choices.SHIPPED, [row, *others])
    asked = ["info", "dummy:llama-3.1-8b", "--program", "--gpu"]
    assert cli.main([*asked, "h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    here = 'prefill attention, NVIDIA H200 (shipped): {"backends": ["a"]} for {"block_size": 256}'
    assert [line for line in lines if "shipped" in line] == [
        here,
        f'{here} with {{"torch": "2.1"}}',
    ]
    assert cli.main([*asked, "b200"]) == 0
    assert "no choice by time is known for b200" in capsys.readouterr().out
