"""One command for all loads of the engine; what each measures is tested beside its parts."""

import benchmark_engine
import pytest
from benchmark_scripts import run_script


@pytest.mark.parametrize("load", benchmark_engine.LOADS)
def test_every_load_has_the_common_options(load, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark_engine.main([load, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: benchmark_engine.py {load} ")
    for option in ("--model", "--device", "--dtype", "--json"):
        assert option in text


def test_an_unknown_load_is_named_with_the_choices(capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark_engine.main(["stready"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "'stready'" in message
    assert all(load in message for load in benchmark_engine.LOADS)


TINY = ("--model", "dummy:tiny", "--device", "cpu", "--prompt-tokens", 8, "--steps", 2)


def test_events(tmp_path):
    options = ("--batch-size", 8, "--num-tokens", 48, "--lookahead", 1)
    record = run_script("benchmark_engine", tmp_path, "events", *TINY, *options)
    assert record["benchmark"] == "events"
    assert record["figures"][0]["rows"] > 0


def test_features(tmp_path):
    options = ("--batch-size", 2, "--windows", 1, "--rounds", 1)
    record = run_script("benchmark_engine", tmp_path, "features", *TINY, *options)
    assert record["benchmark"] == "features"
    assert record["figures"]


def test_ranks_alone(tmp_path):
    record = run_script("benchmark_engine", tmp_path, "ranks", *TINY, "--batch-sizes", 2)
    assert record["benchmark"] == "ranks"
    assert record["figures"][0]["batch"] == 2
