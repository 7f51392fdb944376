"""The script that compares log probs of two settings: distances are 0 where nothing differs, and
those of folders that `convert` wrote where FP8 is emulated."""

from types import SimpleNamespace

import pytest

from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.errors import ConfigurationError
from tests.support.benchmark_scripts import load_script, run_script

SHAPE = (
    "dummy:qwen3_moe:layers=2,hidden=128,heads=2,groups=1,head=128,ffn=128,vocab=64,experts=4,"
    "topk=2"
)
OPTIONS = ("--device", "cpu", "--tokens", 100, "--length", 40)


def distances(tmp_path, model, *settings, more=()):
    record = run_script(
        "benchmark_quality", tmp_path, model, *OPTIONS, *more, "--settings", *settings
    )
    assert record["benchmark"] == "quality"
    assert [row["setting"] for row in record["figures"]] == list(settings[1:])
    assert all(row["tokens"] == 100 for row in record["figures"])
    return record["figures"]


@pytest.mark.parametrize("kind", ["fp8", "fp8-channel"])
def test_emulated_weights_are_those_of_a_converted_folder(kind, tmp_path):
    """Layers and experts; rounding of rows comes on top."""
    convert(SHAPE, tmp_path / "m", dtype="float32", quantization=kind)
    same, rounded, rows, folder = distances(
        tmp_path, SHAPE, "dtype=float32", "dtype=float32,lookahead=0", f"emulate={kind}",
        f"emulate={kind}+rows", f"model={tmp_path / 'm'}",
    )  # fmt: skip
    assert (same["mean"], same["largest"], same["likeliest"], same["shift"]) == (0, 0, 1, 0)
    assert 1e-4 < rounded["mean"] < rows["mean"] < 0.1
    for name in ("mean", "largest", "k3", "likeliest"):
        assert rounded[name] == pytest.approx(folder[name], rel=1e-2, abs=1e-6)
    assert 0 < rounded["k3"] < rounded["largest"]


@pytest.mark.parametrize("model", [SHAPE, "dummy:tiny-gated-delta"])
def test_outliers_make_distances_larger(model, tmp_path):
    """Also where norms multiply by 1 + weight."""
    settings = "dtype=float32", "emulate=fp8-channel"
    (plain,) = distances(tmp_path, model, *settings)
    (planted,) = distances(tmp_path, model, *settings, more=("--outliers", 4))
    assert planted["mean"] > 2 * plain["mean"]


def test_text_is_what_is_scored(tmp_path):
    """In sequences of a length, of which the first token is not scored."""
    (tmp_path / "text").write_text("The sky is blue. " * 40)
    options = {"model": "smollm2", "text": [tmp_path / "text"], "tokens": 100, "length": 41}
    sequences = load_script("benchmark_quality").make_sequences(SimpleNamespace(**options))
    assert [len(each) for each in sequences] == [41, 41, 21]
    tokenizer = open_model("smollm2").tokenizer
    assert tokenizer is not None
    ids = [each for sequence in sequences for each in sequence]
    assert tokenizer.detokenize(ids).startswith("The sky is blue. The sky")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("dummy:tiny", ("--settings", "dtype=float32", "emulate=fp8"), "128 does not divide"),
        ("dummy:tiny", ("--settings", "emulate=int4"), "'int4' is none: fp8, fp8-channel"),
        ("dummy:tiny", ("--settings", "emulate=fp8,dtype=bfloat16"), "float32 on a CPU"),
        ("dummy:tiny", ("--settings", "float32"), "no NAME=VALUE"),
        ("dummy:tiny", ("--text", __file__), "has no tokenizer"),
    ],
)
def test_refused(model, options, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        run_script("benchmark_quality", tmp_path, model, *OPTIONS, *options)


def test_outliers_are_for_random_weights(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_script("benchmark_quality", tmp_path, "smollm2", *OPTIONS, "--outliers", 2)
    assert "is for dummy:SHAPE" in capsys.readouterr().err
