"""Wrong names and values are told before torch is imported; unknown words, with what was meant."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.cli import main as cli
from megatron_async.cli.output import describe
from tests.unit_tests.cli.cli_runs import fails

LATE = """
import contextlib, io, sys
from megatron_async.cli.main import main
for line in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        with contextlib.redirect_stdout(io.StringIO()) as announced:
            try:
                status = main(line.split())
            except SystemExit as end:
                status = end.code
    text = told.getvalue()
    assert status == 2, (line, status, text)
    # One sentence, nothing announced, and nothing heavy read for it.
    assert text.count("\\n") == 1 and len(text) < 400, (line, text)
    assert text.startswith("megatron-async: error: "), (line, text)
    assert not announced.getvalue(), (line, announced.getvalue())
    heavy = {"torch", "numba", "transformers", "megatron.core"} & sys.modules.keys()
    assert not heavy, (line, heavy)
"""


def test_without_torch(tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    (tmp_path / "config.json").write_text("{]")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "layer").write_bytes(bytes(20))
    lines = [
        f"serve smollm2 --port {taken.getsockname()[1]}",
        f"serve {tmp_path}",
        f"serve {tmp_path}/other",
        f"chat {tmp_path}/config.json",
        f"chat smollm2 --draft-layer {tmp_path}/layer",
        "serve",
        "serve smolm2",
        "serve dummy:no",
        "serve /usr",
        "serve /etc/passwd",
        "serve smollm2 --port 99999",
        "serve smollm2 --host no.such.host.invalid",
        "serve smollm2 --api-key-file /no/such",
        "serve smollm2 --ssl-certfile /no/such",
        "serve smollm2 --replicas 0",
        "serve smollm2 --device gpu",
        "serve smollm2 --lookahead 100",
        "serve smollm2 --tensor-model-parallel-size 0",
        "serve smollm2 --policy nope",
        "serve smollm2 --tool-parser nope",
        "serve smollm2 --quantization int3",
        "serve smollm2 --max-body-mb nan",
        "serve smollm2 --shutdown-timeout -1",
        "serve smollm2 --profile-dir /no/such",
        "serve smollm2 --max-unfinished 0",
        "serve smollm2 --coordinator tcp://127.0.0.1:9",
        "serve --coordinator nope",
        "serve --coordinator tcp://127.0.0.1:99999",
        "serve --coordinator tcp://127.0.0.1:9 --secret-file /no/such",
        "replica smolm2",
        "replica smollm2 --coordinator nope",
        "replica smollm2 --device gpu",
        "replica smollm2 --secret-file /no/such",
        "replica smollm2 --metrics-port 99999",
        "coordinator --bind nope",
        "coordinator --policy nope",
        "coordinator --secret-file /no/such",
        "replicas drain",
        "replicas --coordinator nope",
        "bench latency smollm2 --batch-size 0",
        "bench throughput smollm2 --length-sigma -1",
        "bench serve nope",
        "bench serve http://127.0.0.1:1",
        "info smollm2 --memory-gb -1",
        "info /usr",
        "info /etc/passwd",
        "profile smollm2 --batch 0 --out /tmp/never",
        "profile smollm2 --rate 0 --out /tmp/never",
        "profile smollm2 --out /proc/none",
        "chat /usr",
        "chat smollm2 --seed -1",
        "chat smollm2 --draft-layer /no/such",
        "generate smollm2 -p hi --metrics-port 99999",
        "generate smollm2 -p hi --tensor-model-parallel-size 0",
        "generate smollm2 -p hi --buffer-size-gb 0",
        "generate dummy:tiny -p words",
        "generate dummy:tiny -p 1 --chat",
        "convert smollm2 /proc/none/x",
        "convert /usr /tmp/never",
        "simulate --machine /etc/passwd",
        "simulate-fleet --machine nope",
        "simulate-fleet --trace nope",
        "simulate-fleet --replicas 0",
        "replay /etc/passwd",
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
    taken.close()
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


def test_too_many_open_files_has_a_remedy() -> None:
    for error in (OSError(24, "Too many open files"), RuntimeError("socket: Too many open files")):
        assert "`ulimit -n" in describe(error)
    assert "ulimit" not in describe(OSError(28, "No space left on device"))


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


def test_a_library_that_does_not_fit_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Under `ulimit -v 1500000` NumPy tells of it behind a page of advice."""

    def run(*_: object) -> int:
        try:
            raise ImportError("libx.so: failed to map segment from shared object")
        except ImportError as error:
            raise ImportError("\n\nIMPORTANT: PLEASE READ THIS\n") from error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cli, "run_generate", run)
        told = fails(capsys, "generate", "dummy:tiny", "-p", "1")
        assert "as its libraries need (libx.so: failed to map" in told
        assert "ulimit -v" in told
        patched.setattr(cli, "run_generate", lambda _: __import__("no_such_module"))
        with pytest.raises(ImportError):
            cli.main(["generate", "dummy:tiny", "-p", "1"])


def test_help_needs_no_large_library() -> None:
    """`--help`, and a TAB, which parses too, take 0.1 s; NumPy alone would add 0.2 s."""
    code = (
        "import sys; from megatron_async.cli.main import build_parser; build_parser()\n"
        "print([name for name in ('numpy', 'torch', 'zmq', 'huggingface_hub', 'argcomplete') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
