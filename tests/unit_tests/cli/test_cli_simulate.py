"""`generate --record`, `replay` and `simulate` on the command line."""

import json

import pytest

from megatron_async.cli import main as cli


def fails(capsys, *arguments):
    """Run a command that must fail as a user's error; return its one line on stderr."""
    assert cli.main(arguments) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("megatron-async: error: ")
    return line


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "run.rec"
    prompts = [option for i in range(3) for option in ("--prompt", f"{i + 1} {i + 2} {i + 3}")]
    options = ["--device", "cpu", "--no-progress", "--json", "--max-new-tokens", "24"]
    arguments = ["generate", "--model", "dummy:tiny", *options, *prompts, "--record", str(path)]
    assert cli.main(arguments) == 0
    return path


def test_record_and_replay(recording, capsys):
    assert cli.main(["replay", str(recording)]) == 0
    assert capsys.readouterr().out == "24 steps planned, every one as recorded.\n"
    assert cli.main(["replay", str(recording), "--until-step", "3"]) == 0
    output = capsys.readouterr().out
    assert "step 3 is planned; 3 of 256 slots" in output
    assert output.count("DECODING") == 3


def test_bad_recordings_are_one_line(recording, tmp_path, capsys):
    assert "missing.rec: no such file" in fails(capsys, "replay", str(tmp_path / "missing.rec"))
    (tmp_path / "text.rec").write_text("hello")
    assert "that is no recording" in fails(capsys, "replay", str(tmp_path / "text.rec"))
    (tmp_path / "short.rec").write_bytes(recording.read_bytes()[:-60])
    assert "--allow-truncated" in fails(capsys, "replay", str(tmp_path / "short.rec"))
    assert cli.main(["replay", str(tmp_path / "short.rec"), "--allow-truncated"]) == 0
    assert "The recording has no end" in capsys.readouterr().out
    assert "steps 0 to 23" in fails(capsys, "replay", str(recording), "--until-step", "99")
    nowhere = str(tmp_path / "nowhere" / "run.rec")
    generate = ["generate", "--model", "dummy:tiny", "--device", "cpu", "--no-progress"]
    assert "nowhere" in fails(capsys, *generate, "--prompt", "1", "--record", nowhere)


def test_simulate_writes_a_table_and_a_record(tmp_path, capsys):
    path = tmp_path / "figures.json"
    options = ["--num-requests", "40", "--rate", "64", "--lookahead", "0", "1", "--no-progress"]
    assert cli.main(["simulate", *options, "--json", str(path)]) == 0
    output = capsys.readouterr().out
    assert "one H200" in output
    record = json.loads(path.read_text())
    assert record["benchmark"] == "simulate"
    serial, ahead = record["figures"]
    assert (serial["overlap_ratio"], ahead["overlap_ratio"]) == (0, 1)
    assert ahead["idle_share"] < 0.01 < 0.1 < serial["idle_share"]
    assert ahead["tpot_ms"]["p50"] < serial["tpot_ms"]["p50"]
    for title in ("TTFT ms", "TPOT ms", "evictions", "recomputed", "zombies"):
        assert title in output


def test_simulate_by_a_recording(recording, capsys):
    options = ["--machine", str(recording), "--num-requests", "5", "--no-progress"]
    assert cli.main(["simulate", *options, "--rate", "1000", "--lookahead", "1"]) == 0
    output = capsys.readouterr()
    assert "a recording of 22 steps on cpu" in output.out
    assert "the recording reaches: 0 prompt tokens, 3 decode tokens, 78 KV tokens in a step" in (
        output.out
    )
    assert "warning: rate 1000, lookahead 1 is a guess: its steps have up to" in output.err
    assert "prompt tokens (recorded: 0, always" in output.err
    assert (
        "decode tokens (recorded: 3, always, so more of them are taken to cost noth" in output.err
    )


def test_a_simulation_within_the_recording_is_no_guess(tmp_path, capsys):
    """Prompts of other lengths, so that rows and prompt tokens vary; then a smaller load."""
    path = str(tmp_path / "run.rec")
    prompts = [f"--prompt={' '.join(['7'] * (4 * n + 9))}" for n in range(12)]
    options = ["--device", "cpu", "--no-progress", "--max-new-tokens", "24", "--max-requests", "4"]
    arguments = ["generate", "--model", "dummy:tiny", *options, *prompts, "--record", path]
    assert cli.main(arguments) == 0
    options = ["--num-requests", "4", "--max-requests", "2", "--rate", "100", "--lookahead", "1"]
    lengths = ["--prompt-mean", "6", "--max-prompt-tokens", "8", "--output-mean", "8"]
    lengths += ["--max-output-tokens", "12", "--max-step-tokens", "8", "--no-progress"]
    capsys.readouterr()
    assert cli.main(["simulate", "--machine", path, *options, *lengths]) == 0
    output = capsys.readouterr()
    assert "the recording reaches: " in output.out
    assert output.err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--machine", "h100"], "--machine h100 is neither a file nor one of h200:"),
        (["--rate", "0"], "--rate 0 must be above 0"),
        (["--lookahead", "-1"], "--lookahead -1"),
        (["--mixed-step-tokens", "0"], "--mixed-step-tokens 0"),
        (["--num-kv-blocks", "2"], "needs"),
        (
            ["--prompt-mean", "9999"],
            "--prompt-mean 9999 must be from 1 to --max-prompt-tokens 1024",
        ),
        (["--max-output-tokens", "0"], "--output-mean 128 must be from 1 to --max-output-tokens 0"),
        (["--length-sigma", "nan"], "--length-sigma nan must be from 0 to 10"),
        (["--seed", "-1"], "--seed -1 must be 0 or more"),
    ],
)
def test_bad_options_of_simulate(options, message, capsys):
    assert message in fails(capsys, "simulate", "--num-requests", "3", "--no-progress", *options)


def test_impossible_numbers_of_requests(capsys):
    for count in ("0", "9" * 20):
        message = fails(capsys, "simulate", "--num-requests", count)
        assert f"--num-requests {count} must be from 1 to 1048576" in message


@pytest.mark.parametrize(
    ("machine", "options", "ttft_ms", "tpot_ms", "tolerance"),
    [
        ("llama-3.1-8b", ["--rate", 48, "--mixed-step-tokens", 384], 14.3, 5.67, 0.06),
        ("llama-3.1-8b", ["--rate", 48, "--mixed-step-tokens", 256], 16.8, 5.46, 0.06),
        # Mixed steps of so small a model take longer than its decode steps of as many tokens.
        ("smollm2-135m", ["--rate", 200], 1.9, 0.55, 0.3),
    ],
)
def test_predictions_stay_near_the_measurements(
    machine, options, ttft_ms, tpot_ms, tolerance, tmp_path
):
    """docs/records/whole_steps.md, "Late launches on GPUs", "Decode rows beside prompts". A change
    of the scheduler moves both or is a surprise."""
    path = tmp_path / "figures.json"
    options = ["--machine", f"h200:{machine}", *options, "--lookahead", 1, "--no-progress"]
    options += ["--num-requests", 512, "--json", path]
    assert cli.main(["simulate", *map(str, options)]) == 0
    found = json.loads(path.read_text())["figures"][0]
    assert found["ttft_ms"]["p50"] == pytest.approx(ttft_ms, rel=tolerance)
    assert found["tpot_ms"]["p50"] == pytest.approx(tpot_ms, rel=tolerance)
