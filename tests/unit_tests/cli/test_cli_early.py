"""Wrong names and values are told before torch is imported; unknown words, with what was meant."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cli_runs import fails

from megatron_async.cli import main as cli
from megatron_async.cli.output import describe

LATE = """
import contextlib, io, sys
from megatron_async.cli.main import main
for line in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            status = main(line.split())
        except SystemExit as end:
            status = end.code
    assert status == 2, (line, status, told.getvalue())
    assert "torch" not in sys.modules, line
"""


def test_without_torch() -> None:
    lines = [
        "generate smolm2 -p hi",
        "generate dummy:no -p hi",
        "generate smollm2 -p hi --device gpu",
        "generate smollm2 -p hi --lookahead 100",
        "generate smollm2 -p hi --max-requests 0",
        "generate smollm2 -p hi --temperature -1",
        "generate smollm2 -p hi --regex ((",
        "generate smollm2 -p hi --json-schema {]",
        "generate smollm2 -p hi --prompts-file /no/such",
        "generate smollm2 -p hi --record /no/such/folder/x",
        "generate smollm2",
        "generate smollm2 -p hi --temprature 1",
        "profile smolm2 --out /tmp/never",
        "bench latency smolm2",
        "chat smolm2",
        "chat --lookahead -1",
        "chat dummy:tiny",
        "info smolm2",
        "convert smolm2 /tmp/never",
        "convert smollm2 /usr",
        "replay /no/such.rec",
        "replay /usr",
        "simulate --rate 0",
        "simulate --rate nan",
        "simulate --num-requests 0",
        "simulate --lookahead 100",
        "simulate --max-requests 0",
        "simulate --prompt-mean -3",
        "simulate --target-tpot-ms 0",
        "simulate --machine nope",
        "simulate --draft-us -5 --forced-acceptance 0.5",
        "simulate --draft-us 5",
        "simulate --json /no/such/folder/x",
    ]
    done = subprocess.run([sys.executable, "-c", LATE, *lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (OSError(28, "No space left on device"), "cannot write m: no space left on device"),
        (ValueError("many words"), "cannot write m: no space left on device"
         " (cause: ValueError: many words)"),
        (ValueError("first\nTraceback\nOSError: no space left on device\n)"),
         "cannot write m: no space left on device"),
        (ValueError("first\nsecond"), "cannot write m: no space left on device"
         " (cause: ValueError: first)"),
        (KeyError(), "cannot write m: no space left on device (cause: KeyError: )"),
    ],
)  # fmt: skip
def test_a_cause_is_one_line_and_nothing_is_said_twice(cause: Exception, told: str) -> None:
    error = ValueError("cannot write m: no space left on device")
    error.__cause__ = cause
    assert describe(error) == told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "smollm2", "--temprature=1"], "Did you mean --temperature?"),
        (["generate", "smollm2", "--temprature=1"], "(see `megatron-async generate --help`)"),
        (["bench", "latency", "--batchsize", "1"], "`megatron-async bench latency --help`"),
        (["serv"], "Did you mean serve?"),
        (["bench", "latancy"], "Did you mean latency?"),
        (["generate", "smollm2", "extra", "-p", "x"], "unrecognized arguments: extra"),
    ],
)
def test_unknown_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "talk to a model in the terminal" in capsys.readouterr().out


def test_a_model_by_place_or_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["-p", "1 2", "-n", "3", "--device", "cpu", "--no-progress"]
    for model in (["dummy:tiny"], ["--model", "dummy:tiny"], ["-m", "dummy:tiny", "dummy:tiny"]):
        assert cli.main(["generate", *model, *rest]) == 0
        assert "[3 tokens, length" in capsys.readouterr().out
    assert "no model was given" in fails(capsys, "generate", *rest)
    two = fails(capsys, "generate", "dummy:tiny", "--model", "smollm2", *rest)
    assert "two models were given" in two


def test_log_probs_that_nobody_would_see(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--log-probs", "--prompt-log-probs"):
        told = fails(capsys, "generate", "dummy:tiny", "-p", "1", option)
        assert "are shown with --json" in told


def test_a_grammar_that_cannot_be_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    schema = '{"not": {}}'
    told = fails(capsys, "generate", "smollm2", "-p", "x", "--json-schema", schema)
    assert '--json-schema: Unimplemented keys: ["not"] (llguidance cannot hold' in told


def test_help_needs_no_large_library() -> None:
    """`--help`, and a TAB, which parses too, take 0.1 s; NumPy alone would add 0.2 s."""
    code = (
        "import sys; from megatron_async.cli.main import build_parser; build_parser()\n"
        "print([name for name in ('numpy', 'torch', 'zmq', 'huggingface_hub', 'argcomplete') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
